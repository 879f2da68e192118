"""The few calls of the CUDA driver that share memory between processes.

Not through torch: its own sharing hands out pieces of its caching allocator's segments, which keep a whole
segment alive, need a file of reference counts in each process, and cannot be shared at all with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. What is allocated here belongs to nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

from weightlane.device_memory import HANDLE_BYTES
from weightlane.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the only flag that the call takes
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@contextlib.contextmanager
def device_context(number: int) -> Iterator[None]:
    """Makes the primary context of the process's device `number`, which torch uses too, current here."""
    driver = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            _check(driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")
    finally:
        _check(driver.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")


def allocate(nbytes: int) -> int | None:
    """The address of new memory on the current context's device; None where that has not so much free."""
    pointer = ctypes.c_uint64()
    code = _driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    if code == _OUT_OF_MEMORY:
        return None
    _check(code, "cuMemAlloc")
    return pointer.value


def free(pointer: int) -> None:
    """Gives memory back that `allocate` gave."""
    _check(_driver().cuMemFree_v2(ctypes.c_uint64(pointer)), "cuMemFree")


def export_handle(pointer: int) -> bytes:
    """What another process opens that memory with."""
    handle = _IpcHandle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(pointer)), "cuIpcGetMemHandle")
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """The address here of another process's memory on the same device."""
    pointer = ctypes.c_uint64()
    given = _IpcHandle.from_buffer_copy(handle)
    call = _driver().cuIpcOpenMemHandle_v2
    _check(call(ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS)), "cuIpcOpenMemHandle")
    return pointer.value


def close_handle(pointer: int) -> None:
    """Unmaps what `open_handle` mapped; the memory is its owner's."""
    _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(pointer)), "cuIpcCloseMemHandle")


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SyncError(
            f"{_LIBRARY} cannot be loaded.",
            f"{error}: this is no machine with an NVIDIA driver.",
            "Connect with transport='shm'.",
        ) from error


def _check(code: int, call: str) -> None:
    if code == 0:
        return
    name = ctypes.c_char_p()
    told = _driver().cuGetErrorName(code, ctypes.byref(name)) == 0 and name.value
    raise SyncError(
        f"The CUDA driver refused {call} with {told.decode() if told else f'error {code}'}.",
        "Sharing memory of a GPU needs both processes on the same device, on Linux, in containers that share "
        "the IPC namespace.",
        "Connect with transport='shm', which does without.",
    )
