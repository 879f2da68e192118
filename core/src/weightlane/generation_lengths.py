"""Whether an engine gave continuations of the length that was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.messages import Generation


def require_lengths(generations: Sequence[Generation], max_tokens: int, *, engine: str) -> None:
    """Every continuation has exactly `max_tokens` tokens and as many log-probs.

    Raises:
        EngineError: one has not; names its prompt and `engine`.
    """
    for number, generation in enumerate(generations):
        tokens, logprobs = len(generation.token_ids), len(generation.logprobs)
        if tokens != max_tokens or logprobs != max_tokens:
            raise EngineError(
                f"{engine} continued prompt {number} by {tokens} tokens with {logprobs} log-probs, not by "
                f"{max_tokens}.",
                "An engine cuts a continuation short where prompt and continuation exceed its own bound on "
                "their length.",
                "Ask for fewer tokens, or start the engine with a larger bound.",
            )
