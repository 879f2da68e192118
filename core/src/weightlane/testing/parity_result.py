"""What one sync showed of an engine and its trainer."""

from __future__ import annotations

import msgspec

LARGEST_DIFFERENCE = 1e-4
"""fp32 log-probs of the same weights in two implementations agree to this."""
SMALLEST_MOVE = 1e-2
"""A sync that moved the trainer's log-probs by less proves nothing."""


class SyncParity(msgspec.Struct, frozen=True):
    """One sync's outcome.

    `moved` is the largest change of the trainer's log-probs since the sync before, `difference` the largest
    between trainer and engine on the engine's own tokens, `versions` those stamped on the generations.
    `base_unchanged` is for mode adapter, where the engine's weights can be looked at.
    """

    sync: int
    tokens_equal: bool
    difference: float
    moved: float
    versions: tuple[int | None, ...]
    nbytes: int
    seconds: float
    verified: tuple[str, ...]
    text: str = ""
    phases: tuple[str, ...] = ()
    base_unchanged: bool | None = None

    @property
    def holds(self) -> bool:
        """Equal tokens, equal log-probs, a sync that changed something, and a base that it left alone."""
        agree = self.tokens_equal and self.difference <= LARGEST_DIFFERENCE
        return agree and self.moved >= SMALLEST_MOVE and self.base_unchanged is not False
