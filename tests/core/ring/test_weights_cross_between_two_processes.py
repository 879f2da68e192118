"""Two processes, one ring: every value arrives as it was, sync after sync, also through few slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from ring_peers import beating, layouts_of, open_reader, reads, wires_of, write_sync
from torch import Tensor

from weightlane.buckets import slot_sizes
from weightlane.manifest import DTYPE_BYTES
from weightlane.packing import dtype_name, memory_of, torch_dtype, unpack_bucket
from weightlane.ring import RingWriter
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def some(dtype: str, *shape: int) -> Tensor:
        count = torch.Size(shape).numel() * DTYPE_BYTES[dtype]
        highest = 2 if dtype == "bool" else 256
        data = torch.randint(0, highest, (count,), dtype=torch.uint8, generator=generator)
        return data.view(torch_dtype(dtype)).reshape(shape)

    found = {"odd": some("uint8", 3), "halves": some("float16", 3), "float": some("float32", 2)}
    found |= {dtype: some(dtype, 5, 3) for dtype in sorted(DTYPE_BYTES)}
    found |= {
        "scalar": some("bfloat16"),
        "none": some("float32", 0, 4),
        "strided": some("int32", 4, 6)[::2, 1:4],
    }
    return found | {"large": some("uint8", 1000), "end": some("float64", 1)}


def as_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (dtype_name(t.dtype), tuple(t.shape), bytes(memory_of(t.contiguous())))
        for name, t in tensors.items()
    }


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(label="test", slot_sizes=slot_sizes(layouts_of(wires_of(weights(0)))), peer="worker 0")
    yield ring
    ring.close()


@pytest.mark.requirement("R60")
@pytest.mark.requirement("R62")
@pytest.mark.requirement("R63")
def test_three_syncs_of_every_dtype(start_peer: Callable[..., Any], writer: RingWriter) -> None:
    wires = wires_of(weights(0))
    assert len(layouts_of(wires)) > 6
    with start_peer(reads, str(writer.path), wires, 3) as peer, beating(writer):
        for sync in (1, 2, 3):
            sent = weights(sync)
            write_sync(writer, sent, sync)
            assert peer.told() == as_bytes(sent)
        peer.process.join(10)
        assert peer.process.exitcode == 0


@pytest.mark.requirement("R59")
def test_an_empty_plan_still_has_an_end(start_peer: Callable[..., Any]) -> None:
    writer = RingWriter(label="test", slot_sizes=slot_sizes(layouts_of(())), peer="worker 0")
    try:
        with start_peer(reads, str(writer.path), (), 1) as peer, beating(writer):
            write_sync(writer, {}, 1)
            assert peer.told() == {}
    finally:
        writer.close()


@pytest.mark.requirement("R61")
def test_a_slot_is_written_again_only_after_its_release() -> None:
    # Slots 0 and 1 in turn: bucket 2 goes where bucket 0 was.
    sent = {str(number): torch.full((64,), float(number)) for number in range(3)}
    wires = wires_of(sent)
    layouts = layouts_of(wires)
    assert [layout.slot for layout in layouts] == [0, 1, 0]
    writer = RingWriter(label="test", slot_sizes=slot_sizes(layouts), peer="worker 0")
    reader = open_reader(str(writer.path), wires)
    try:
        reader.begin(1)
        write_sync(writer, sent, 1, buckets=2)
        bucket, memory, _ = reader.take(layouts[0], sync=1, seconds=1, lost_after=9)
        ((_, view),) = unpack_bucket(bucket, layouts[0], wires)
        copy = view.clone()
        reader.beat()
        bounds = {"seconds": 0.2, "lost_after": 9.0, "check": nothing_to_check}
        with pytest.raises(Exception, match="a free slot for bucket 2"):
            writer.acquire(layouts[2], sync=1, **bounds)
        assert torch.equal(view, sent["0"])
        reader.release(layouts[0], sync=1)
        writer.acquire(layouts[2], sync=1, **bounds).fill_(0)
        # Whoever kept the view sees the next bucket in it; whoever copied does not.
        assert torch.equal(view, torch.zeros(64))
        assert torch.equal(copy, sent["0"])
        del view, bucket, memory
    finally:
        reader.close()
        writer.close()
