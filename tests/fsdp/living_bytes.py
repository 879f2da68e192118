"""Counts the bytes of tensors that are made and still alive: exact, unlike the memory of the process."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LivingBytes(TorchDispatchMode):
    """`peak` and `now` are over storages that operators made inside, for as long as anything holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        held = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _counts(leaf) and id(leaf.untyped_storage()) not in held:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:
            return
        nbytes, number = storage.nbytes(), id(storage)
        self._known.add(number)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.discard(number)
            self.now -= nbytes

        weakref.finalize(storage, gone)


def _counts(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and type(leaf) in (torch.Tensor, torch.nn.Parameter)
