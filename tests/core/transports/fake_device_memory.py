"""Stands for a GPU that both ends of transport `cuda_ipc` are on: memory of this process under a handle."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from weightlane.device_memory import HANDLE_BYTES, DeviceMemoryHandle

if TYPE_CHECKING:
    from torch import Tensor

GPU = "GPU-0"


class FakeDeviceMemory:
    """One end's view of bytes; notes in `events` when the device was waited for and when it was let go."""

    def __init__(self, gpu: FakeGpu, name: str, handle: DeviceMemoryHandle) -> None:
        self.handle = handle
        self._gpu = gpu
        self._name = name
        self._open = True

    def slot(self, offset: int, nbytes: int) -> Tensor:
        assert self._open, "used after it was let go"
        return self._gpu.allocations[self.handle.handle][offset : offset + nbytes]

    def settle(self) -> None:
        assert self._open
        self._gpu.events.append(f"{self._name} settles")

    def close(self) -> None:
        if self._open:
            self._open = False
            self._gpu.events.append(f"{self._name} lets go")
            if self._name == "sender":
                del self._gpu.allocations[self.handle.handle]


class FakeGpu:
    """`DeviceMemories` of both ends, in one process."""

    def __init__(self) -> None:
        self.allocations: dict[bytes, Tensor] = {}
        self.events: list[str] = []
        self.opens = True

    def allocate(self, gpu_uuid: str, nbytes: int) -> FakeDeviceMemory:
        handle = DeviceMemoryHandle(gpu_uuid, secrets.token_bytes(HANDLE_BYTES), nbytes)
        self.allocations[handle.handle] = torch.zeros(nbytes, dtype=torch.uint8)
        return FakeDeviceMemory(self, "sender", handle)

    def open(self, handle: DeviceMemoryHandle) -> FakeDeviceMemory:
        if not self.opens:
            raise OSError("the driver does not map it")
        assert self.allocations[handle.handle].numel() == handle.nbytes
        return FakeDeviceMemory(self, "receiver", handle)
