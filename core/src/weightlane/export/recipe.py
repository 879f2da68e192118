"""One exported tensor as a pure function of what the trainer holds, so that it can be made bucket by bucket.

A trainer that shards gathers the sources and then makes the tensor; live weights are never written, so there
is nothing to restore afterwards and nothing that goes stale (invariant 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Make: TypeAlias = "Callable[[Sequence[Tensor]], Tensor]"
"""Gives the tensor from its sources, whole and in the order of `Recipe.sources`. Never writes to a source;
may return one, or a view of one."""


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the trainer as a whole, however it is sharded.

    `key` is its path in the module tree without the segments that FSDP, torch.compile and activation
    checkpointing put there; `shape` the global shape; `dtype` torch's name of it, without `torch.`.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """A checkpoint tensor: what it is called, what it looks like, and how it is made.

    `sources` are keys. Recipes of one source that follow each other (experts taken out of a fused tensor) let
    a trainer gather it once. `alias_of` names the earlier recipe whose tensor this is: tied weights.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    make: Make
    alias_of: str = ""
