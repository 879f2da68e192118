"""Memory of one GPU that a trainer rank owns and a worker on the same GPU maps: what a transport needs of it.

No torch here. `weightlane.transports.cuda_memory` has the real thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

HANDLE_BYTES = 64
"""Size of a CUDA IPC memory handle (`CU_IPC_HANDLE_SIZE`)."""


class DeviceMemoryHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker needs to map a rank's memory: plain fields, exchanged once, at connect.

    `gpu_uuid` is the device that both must be on, whose number may differ between the processes. `handle` is
    the driver's own, opaque. `nbytes` is the whole allocation, in which slots follow one another.
    """

    gpu_uuid: Annotated[str, msgspec.Meta(min_length=1, max_length=80)]
    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]


class DeviceMemory(Protocol):
    """One end's view of the allocation: the rank's, which owns it, or the worker's, which maps it."""

    handle: DeviceMemoryHandle

    def slot(self, offset: int, nbytes: int) -> Tensor:
        """The bytes from `offset` on as a uint8 tensor of shape (nbytes,) that shares this memory."""

    def settle(self) -> None:
        """Waits until everything that this process has started on the device is done."""

    def close(self) -> None:
        """Frees (the owner) or unmaps (the worker); every view must be gone. Idempotent."""


class DeviceMemories(Protocol):
    """Makes both ends; the one thing of a GPU that tests without one replace."""

    def allocate(self, gpu_uuid: str, nbytes: int) -> DeviceMemory:
        """New memory on that device, owned by this process."""

    def open(self, handle: DeviceMemoryHandle) -> DeviceMemory:
        """Memory of another process of the same device."""
