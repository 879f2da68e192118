"""Renames that vLLM's `load_weights` of a family makes in its code, where no table of the class tells them.

Only for planning without a trace, and only followed to a tensor that is live.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECES = (
    # granitemoe.py: fused experts and their router.
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".block_sparse_moe.router.layer.", ".block_sparse_moe.gate."),
)


def loader_names(name: str) -> Iterator[str]:
    """What some family's loader makes of `name`, if any does. Pieces are whole parts of a name."""
    for old, new in _PIECES:
        if old in name:
            yield name.replace(old, new, 1)
