"""Our entry into SGLang's scheduler: `--custom-weight-loader weightlane_sglang.weight_loader.answer`.

SGLang imports this module at the first request that names it, and an exception that leaves it would end the
whole server: so nothing of ours is imported before the guard below.
"""

from __future__ import annotations

import logging
from typing import Any


def answer(model: Any, named_tensors: Any) -> None:
    """Answers one request of a weightlane controller by a file in the run folder; loads no weights.

    Never raises. What cannot be answered by a file is told in the server's log.
    """
    try:
        from weightlane_sglang.loader_answers import answer_request

        answer_request(model, named_tensors)
    except Exception:
        logging.getLogger(__name__).exception(
            "weightlane: a request for %s.answer was not answered, and nothing was written", __name__
        )
