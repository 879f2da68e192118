"""Two processes on one GPU: what one packs is what the other maps, and each lets go of its end."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from weightlane.device_memory import DeviceMemoryHandle
from weightlane.errors import SyncError
from weightlane.gpu_identity import gpu_uuid
from weightlane.transports.cuda_memory import CudaMemories

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NBYTES = 96 << 20
READER = """
import sys
import msgspec, torch
from weightlane.device_memory import DeviceMemoryHandle
from weightlane.transports.cuda_memory import CudaMemories
memory = CudaMemories().open(msgspec.msgpack.decode(open(sys.argv[1], "rb").read(), type=DeviceMemoryHandle))
slot = memory.slot(64, memory.handle.nbytes - 64)
assert slot.is_cuda and slot.dtype is torch.uint8
print(int(slot.long().sum()), slot[:4].tolist())
slot[0] = 77
memory.settle()
del slot
memory.close()
memory.close()
"""


def read_elsewhere(handle: DeviceMemoryHandle, tmp_path: Path, **environment: str) -> str:
    """What another process sees in the memory; it writes 77 at byte 64."""
    told = tmp_path / "handle"
    told.write_bytes(msgspec.msgpack.encode(handle))
    done = subprocess.run(
        [sys.executable, "-c", READER, str(told)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_what_is_packed_here_is_read_there_and_the_other_way_round(tmp_path: Path, allocator: str) -> None:
    import torch

    uuid = gpu_uuid(torch.device("cuda", 0))
    assert uuid
    memory = CudaMemories().allocate(uuid, NBYTES)
    memory.slot(0, NBYTES).fill_(3)
    memory.slot(64, 4).copy_(torch.tensor([9, 8, 7, 6], dtype=torch.uint8))
    memory.settle()
    seen = read_elsewhere(memory.handle, tmp_path, PYTORCH_CUDA_ALLOC_CONF=allocator)
    assert seen == f"{3 * (NBYTES - 68) + 30} [9, 8, 7, 6]"
    assert memory.slot(64, 2).tolist() == [77, 8]
    memory.close()


def test_memory_is_the_driver_s_again_once_it_is_let_go() -> None:
    import torch

    uuid = gpu_uuid(torch.device("cuda", 0))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(10):
        memory = CudaMemories().allocate(uuid, NBYTES)
        assert before - torch.cuda.mem_get_info()[0] >= NBYTES
        memory.close()
        memory.close()
        with pytest.raises(RuntimeError, match="closed"):
            memory.slot(0, 1)
    assert torch.cuda.mem_get_info()[0] == before


def test_more_than_there_is_is_refused_with_figures() -> None:
    import torch

    uuid = gpu_uuid(torch.device("cuda", 0))
    with pytest.raises(SyncError, match=r"has no \d+ bytes for the slots") as refused:
        CudaMemories().allocate(uuid, 1 << 44)
    assert "bytes are free" in str(refused.value)


def test_a_handle_that_no_driver_made_is_refused() -> None:
    import torch

    made_up = DeviceMemoryHandle(gpu_uuid(torch.device("cuda", 0)), bytes(range(64)), NBYTES)
    with pytest.raises(SyncError, match="refused cuIpcOpenMemHandle with CUDA_ERROR"):
        CudaMemories().open(made_up)
