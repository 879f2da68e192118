"""Device memory of transport `cuda_ipc`: allocated by a trainer rank, mapped by the worker on its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.device_memory import DeviceMemoryHandle
from weightlane.errors import SyncError
from weightlane.gpu_identity import device_with
from weightlane.transports import cuda_driver

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


class CudaMemory:
    """One end's view of an allocation.

    Args:
        pointer: where it lies in this process.
        device: on which device of this process.
        handle: what it was shared with.
        release: gives the pointer back, called once, with the device's context current.
    """

    def __init__(
        self, pointer: int, device: torch.device, handle: DeviceMemoryHandle, release: Callable[[int], None]
    ) -> None:
        self.handle = handle
        self._pointer = pointer
        self._device = device
        self._release = release

    def slot(self, offset: int, nbytes: int) -> Tensor:
        """The bytes from `offset` on as a uint8 tensor of shape (nbytes,) that shares this memory."""
        import torch

        if not self._pointer or offset < 0 or offset + nbytes > self.handle.nbytes:
            raise RuntimeError(
                f"no bytes {offset} to {offset + nbytes} in device memory that is closed or less"
            )
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(self._pointer + offset, nbytes), device=self._device)

    def settle(self) -> None:
        """Waits for the whole device, since a loader may have copied on a stream of its own."""
        import torch

        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Frees or unmaps, once nothing on the device can still use it. Idempotent."""
        if self._pointer:
            pointer, self._pointer = self._pointer, 0
            self.settle()
            with cuda_driver.device_context(_number(self._device)):
                self._release(pointer)


class CudaMemories:
    """`DeviceMemories` of this process's CUDA devices."""

    def allocate(self, gpu_uuid: str, nbytes: int) -> CudaMemory:
        """New memory of exactly this size, outside torch's allocator.

        Raises:
            ProtocolError: no such device here.
            SyncError: the driver has not that much, also once torch's unused cache was given back.
        """
        device = _ready(gpu_uuid)
        with cuda_driver.device_context(_number(device)):
            pointer = _allocated(nbytes, device)
            try:
                handle = DeviceMemoryHandle(gpu_uuid, cuda_driver.export_handle(pointer), nbytes)
            except BaseException:
                cuda_driver.free(pointer)
                raise
        return CudaMemory(pointer, device, handle, cuda_driver.free)

    def open(self, handle: DeviceMemoryHandle) -> CudaMemory:
        """The rank's memory, mapped here.

        Raises:
            ProtocolError: no such device here.
            SyncError: the driver does not map it.
        """
        device = _ready(handle.gpu_uuid)
        with cuda_driver.device_context(_number(device)):
            pointer = cuda_driver.open_handle(handle.handle)
        return CudaMemory(pointer, device, handle, cuda_driver.close_handle)


class _Bytes:
    """Foreign device memory as torch takes it: by CUDA Array Interface, version 3, without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _allocated(nbytes: int, device: torch.device) -> int:
    import torch

    pointer = cuda_driver.allocate(nbytes)
    if pointer is None:
        torch.cuda.empty_cache()  # what torch holds free, nobody else can have
        pointer = cuda_driver.allocate(nbytes)
    if pointer is None:
        free, total = torch.cuda.mem_get_info(device)
        raise SyncError(
            f"{device} has no {nbytes} bytes for the slots of transport cuda_ipc.",
            f"{free} of its {total} bytes are free.",
            "Connect with smaller buckets (bucket_bytes), let the engine take less, or use transport='shm'.",
        )
    return pointer


def _ready(gpu_uuid: str) -> torch.device:
    import torch

    device = device_with(gpu_uuid)
    torch.cuda.synchronize(device)  # its context exists from here on
    return device


def _number(device: torch.device) -> int:
    """The driver's number in this process: CUDA_VISIBLE_DEVICES holds for it as for torch."""
    return device.index or 0
