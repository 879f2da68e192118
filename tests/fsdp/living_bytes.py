"""Counts the bytes of tensors that are made and still alive: exact, unlike the memory of the process."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType


_RELEASE_SECONDS = 1.0


class LivingBytes(TorchDispatchMode):
    """`peak` and `now` are over storages that operators made inside, for as long as anything holds them.

    A thread of gloo lets go of a finished collective's tensors only when it gets the interpreter and a core.
    Where more lives than is allowed, and at the end, such threads get up to a second: what then still lives,
    the export holds.

    Args:
        allowed: bytes.
    """

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._allowed = allowed
        self._known: set[int] = set()
        # A storage may go in any thread, also in this one while it counts.
        self._lock = threading.RLock()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        self._wait_for(0)

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
        nbytes, number = storage.nbytes(), id(storage)
        with self._lock:
            if number in self._known:
                return
            self._known.add(number)
            self.now += nbytes

        def gone() -> None:
            with self._lock:
                self._known.discard(number)
                self.now -= nbytes

        weakref.finalize(storage, gone)
        if self.peak <= self._allowed:
            self._wait_for(self._allowed)
        self.peak = max(self.peak, self.now)

    def _wait_for(self, nbytes: int) -> None:
        deadline = time.monotonic() + _RELEASE_SECONDS
        while self.now > nbytes and time.monotonic() < deadline:
            time.sleep(0.001)


def _counts(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and type(leaf) in (torch.Tensor, torch.nn.Parameter)
