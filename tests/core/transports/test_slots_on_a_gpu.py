"""Slots in memory of a GPU: when the device is waited for, who frees them when, and what is refused."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from fake_device_memory import GPU, FakeGpu
from transport_rig import plan_of, rig_of

from weightlane.buckets import ALIGNMENT
from weightlane.device_memory import HANDLE_BYTES, DeviceMemoryHandle
from weightlane.errors import ProtocolError, SyncError
from weightlane.ring import RingReader, RingWriter
from weightlane.transports import cuda_driver, cuda_ipc
from weightlane.transports.cuda_ipc import CudaIpcReader, CudaIpcSink, DeviceSlots
from weightlane.transports.cuda_memory import CudaMemories

if TYPE_CHECKING:
    from torch import Tensor
    from transport_rig import Rig


def four() -> dict[str, Tensor]:
    return {f"w{number}": torch.full((60,), float(number)) for number in range(4)}


def noted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of the fake device, with posts and releases of the ring among them."""
    events = rig.gpu.events
    post, release = RingWriter.post, RingReader.release
    monkeypatch.setattr(
        RingWriter, "post", lambda ring, layout, **at: (events.append("post"), post(ring, layout, **at))
    )
    monkeypatch.setattr(
        RingReader,
        "release",
        lambda ring, layout, **at: (events.append("release"), release(ring, layout, **at)),
    )
    return events


def unsettled(events: list[str]) -> list[str]:
    """Posts and releases before which that side has not waited for the device since its last."""
    found: list[str] = []
    for word, side in (("post", "sender"), ("release", "receiver")):
        own = ["", *(event for event in events if event in (word, f"{side} settles"))]
        found += [word for before, event in pairwise(own) if event == word and before in (word, "")]
    return found


@pytest.mark.requirement("R61")
def test_nothing_is_posted_or_released_before_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig_of(four(), "cuda_ipc") as rig:
        events = noted(rig, monkeypatch)
        rig.move(1, 11)
        rig.reports(1)
        assert (events.count("post"), events.count("release")) == (4, 4)
        assert unsettled(events) == []


def test_control_a_side_that_does_not_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig_of(four(), "cuda_ipc") as rig:
        events = noted(rig, monkeypatch)
        monkeypatch.setattr(type(rig.sink._memory), "settle", lambda memory: None)
        rig.move(1, 11)
        rig.reports(1)
        assert unsettled(events) == ["post"] * 4 + ["release"] * 4


def test_no_byte_of_a_bucket_is_in_the_ring() -> None:
    with rig_of(four(), "cuda_ipc") as rig:
        assert os.fstat(rig.sink.ring._file.descriptor).st_size == 4096
        assert sum(memory.numel() for memory in rig.gpu.allocations.values()) == 2 * 256


def test_one_allocation_serves_every_sync_and_is_let_go_by_the_worker_first() -> None:
    with rig_of(four(), "cuda_ipc") as rig:
        for sync in (1, 2, 3):
            rig.move(sync, sync)
            rig.reports(sync)
        assert len(rig.gpu.allocations) == 1
        rig.close()
        assert [event for event in rig.gpu.events if "lets go" in event] == [
            "receiver lets go",
            "sender lets go",
        ]
        assert not rig.gpu.allocations


def test_a_sender_waits_for_a_worker_that_has_not_unmapped_yet_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_ipc, "_DETACH_SECONDS", 0.05)
    with rig_of(four(), "cuda_ipc") as rig:
        waits: list[bool] = []
        whole = RingWriter.wait_detached

        def wait(ring: Any, seconds: float) -> bool:
            waits.append(whole(ring, seconds))
            return waits[-1]

        monkeypatch.setattr(RingWriter, "wait_detached", wait)
        rig.sink.close()
        assert waits == [False], "this very process holds the other end"
        assert rig.gpu.events[-1] == "sender lets go"


def test_a_worker_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig_of(four(), "cuda_ipc") as rig:
        rig.sink.ring._set_word(7, 2**22 + 1)  # above any process number of Linux
        assert rig.sink.ring.wait_detached(0.0)


def test_the_ring_is_closed_when_memory_cannot_be_had_or_mapped() -> None:
    gpu = FakeGpu()
    plan = plan_of(four(), "cuda_ipc")

    class FakeFullGpu(FakeGpu):
        def allocate(self, gpu_uuid: str, nbytes: int) -> Any:
            assert (gpu_uuid, nbytes) == (GPU, 512)
            raise SyncError("no room")

    with pytest.raises(SyncError, match="no room"):
        CudaIpcSink(plan, replica=0, worker=0, memories=FakeFullGpu())
    sink = CudaIpcSink(plan, replica=0, worker=0, memories=gpu)
    gpu.opens = False
    received = plan.receive_plan(0, [sink.place])
    with pytest.raises(OSError, match="does not map"):
        CudaIpcReader(received, 0, sink.path, gpu)
    assert sink.ring.wait_detached(0.0), "the reader's end was closed"
    sink.close()
    assert not Path(sink.path).exists()


@pytest.mark.parametrize("change", ["absent", "smaller"])
def test_memory_of_another_size_is_refused_before_anything_is_mapped(change: str) -> None:
    gpu = FakeGpu()
    plan = plan_of(four(), "cuda_ipc")
    sink = CudaIpcSink(plan, replica=0, worker=0, memories=gpu)
    received = plan.receive_plan(0, [sink.place])
    handle = received.memory[0]
    memory = {} if change == "absent" else {0: msgspec.structs.replace(handle, nbytes=handle.nbytes - 64)}
    with pytest.raises(ProtocolError, match="Its slots need 512 bytes"):
        CudaIpcReader(msgspec.structs.replace(received, memory=memory), 0, sink.path, gpu)
    sink.close()


def test_slots_follow_one_another_aligned_for_every_dtype() -> None:
    plan = plan_of(
        {"odd": torch.zeros(3, dtype=torch.uint8), "large": torch.zeros(100), **four()}, "cuda_ipc"
    )
    slots = DeviceSlots(plan.buckets)
    ends = [(slots.start(layout), slots.start(layout) + layout.nbytes) for layout in plan.buckets]
    assert all(start % ALIGNMENT == 0 and end <= slots.nbytes for start, end in ends)
    by_slot = {layout.slot: slots.start(layout) for layout in plan.buckets}
    assert len(set(by_slot.values())) == len(by_slot) == slots.count


@pytest.mark.parametrize(
    ("field", "value"), [("handle", b"x" * (HANDLE_BYTES - 1)), ("nbytes", 0), ("gpu_uuid", "")]
)
def test_a_handle_that_cannot_be_one_is_refused_on_the_way(field: str, value: Any) -> None:
    whole = {"gpu_uuid": GPU, "handle": b"x" * HANDLE_BYTES, "nbytes": 64}
    msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=DeviceMemoryHandle)
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**whole, field: value}), type=DeviceMemoryHandle)


def test_without_a_gpu_the_refusal_says_what_is_seen() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ProtocolError, match="GPU-7 is not visible in this process") as refused:
        CudaMemories().allocate("GPU-7", 64)
    assert "transport='shm'" in refused.value.fix


def test_without_a_driver_the_refusal_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libnosuchdriver.so.1")
    cuda_driver._driver.cache_clear()
    with pytest.raises(SyncError, match=r"libnosuchdriver\.so\.1 cannot be loaded"):
        cuda_driver.allocate(64)
    cuda_driver._driver.cache_clear()
