"""Where a twin says that it lies: where the live tensor does, so that a loader goes the way of a real load.

A twin is on the meta device, and loaders ask: some engines put tensors without data in a model to fill them
in later, and then take another way. Torch's own code is told the truth, since it runs operators by it.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from weightlane.trace.plain_writes import PlainWrites
from weightlane.trace.stand_ins import StandIn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ANSWERS: dict[str, Callable[[torch.device], object]] = {
    "device": lambda device: device,
    "is_meta": lambda device: device.type == "meta",
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
}
_LOCK = threading.Lock()  # bounded by what is done under it: four attributes are set or removed
_running = 0


@contextmanager
def twins_seem_live() -> Iterator[None]:
    """On threads on which `plain_writes_seen` sees operators; elsewhere nothing is answered otherwise."""
    global _running  # noqa: PLW0603 - traces may overlap, and torch has one class of tensors
    with _LOCK:
        _running += 1
        if _running == 1:
            for name, answer in _ANSWERS.items():
                setattr(torch.Tensor, name, _asked(name, answer))
    try:
        yield
    finally:
        with _LOCK:
            _running -= 1
            if not _running:
                for name in _ANSWERS:
                    delattr(torch.Tensor, name)  # what torch's own base class answers shows again


def _asked(name: str, answer: Callable[[torch.device], object]) -> property:
    truth: Any = getattr(torch._C.TensorBase, name)

    def get(tensor: torch.Tensor) -> Any:
        told = truth.__get__(tensor)
        # None while an operator is carried out: its rules need the truth.
        mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
        if not isinstance(mode, PlainWrites) or isinstance(tensor, StandIn):
            return told
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
            return told
        return answer(mode.dispatcher.device) if mode.dispatcher.is_target_without_data(tensor) else told

    return property(get)
