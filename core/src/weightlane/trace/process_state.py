"""Torch's settings of a process, put back after a load: one that a trace stops halfway cannot do it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def process_as_found() -> Iterator[None]:
    """Default dtype and device, and the states of torch's random numbers, are afterwards what they were.

    A real load may change them too; but a trace is one more load, which nobody asked for, and raises in the
    midst of some.
    """
    dtype, device = torch.get_default_dtype(), _default_device()
    numbers = torch.get_rng_state()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if _default_device() != device:
            torch.set_default_device(device)
        torch.set_rng_state(numbers)
        if on_cuda:
            torch.cuda.set_rng_state_all(on_cuda)


def _default_device() -> torch.device | None:
    """That of `set_default_device`, which `get_default_device` does not tell from a `with` around it."""
    context: Any = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device
