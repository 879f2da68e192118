"""On demand: the versions that no other session has, and the result that is kept of them.

`noxfile.py` imports this, which makes nox find the session. It takes half an hour on two cores, and leaves
nothing but the result: what it builds it removes.
"""

from __future__ import annotations

import sys

import nox
from nox_engines import ROOT, other_sglangs, run_trainer_pytest, sglang_python

sys.path.insert(0, str(ROOT / "tests/matrix"))

from shown_modules import RESULT


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """SGLang of other versions: live ones, and the requests of every version in which a shape changes.

    What passed is written to the result, from which the site makes its table; where the code is the same, a
    run of some tests alone (`-- -k 0.5.16`) adds to it. A test of every CI fails once that code is another.
    """
    with sglang_python(session) as python, other_sglangs(session, python) as versions:
        options = (
            f"--sglang-python={python}",
            f"--sglang-versions={versions}",
            f"--matrix-result={ROOT / RESULT}",
        )
        run_trainer_pytest(session, "sglang/matrix", *options)
