"""What the other process does at its end of a ring."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightlane.buckets import lay_out_buckets, slot_sizes
from weightlane.errors import WeightlaneError
from weightlane.messages import WireTensor
from weightlane.packing import dtype_name, memory_of, pack_bucket, unpack_bucket
from weightlane.ring import Ring, RingReader, RingWriter
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from weightlane.buckets import BucketLayout

BUCKET_BYTES = 256


def wires_of(tensors: dict[str, Tensor]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items())


def layouts_of(wires: Sequence[WireTensor]) -> tuple[BucketLayout, ...]:
    return lay_out_buckets(wires, bucket_bytes=BUCKET_BYTES)


@contextmanager
def beating(*rings: RingWriter | RingReader) -> Iterator[None]:
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            for ring in rings:
                ring.beat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def write_sync(
    ring: RingWriter,
    tensors: dict[str, Tensor],
    sync: int,
    *,
    seconds: float = 30.0,
    lost_after: float = 5.0,
    buckets: int | None = None,
) -> None:
    """One whole sync, or its first `buckets` buckets without the end."""
    wires, values = wires_of(tensors), list(tensors.values())
    bounds = {"seconds": seconds, "lost_after": lost_after, "check": nothing_to_check}
    ring.begin(sync)
    for layout in layouts_of(wires)[:buckets]:
        slot = ring.acquire(layout, sync=sync, **bounds)
        pack_bucket(slot, layout, wires, [(entry.tensor, values[entry.tensor]) for entry in layout.entries])
        del slot
        ring.post(layout, sync=sync)
    if buckets is None:
        ring.drain(sync=sync, **bounds)


def read_sync(
    ring: RingReader,
    wires: Sequence[WireTensor],
    sync: int,
    *,
    seconds: float = 30.0,
    lost_after: float = 5.0,
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Copies of everything, as (dtype, shape, bytes)."""
    found = {}
    ring.begin(sync)
    for layout in layouts_of(wires):
        bucket, memory, _ = ring.take(layout, sync=sync, seconds=seconds, lost_after=lost_after)
        for name, view in unpack_bucket(bucket, layout, wires):
            copy = view.clone()
            found[name] = (dtype_name(copy.dtype), tuple(copy.shape), bytes(memory_of(copy)))
            del view
        del bucket, memory
        ring.release(layout, sync=sync)
    return found


def open_reader(path: str, wires: Sequence[WireTensor]) -> RingReader:
    return RingReader(path, slot_sizes(layouts_of(wires)))


def reads(pipe: Connection, path: str, wires: Sequence[WireTensor], syncs: int) -> None:
    ring = open_reader(path, wires)
    with beating(ring):
        for sync in range(1, syncs + 1):
            pipe.send(read_sync(ring, wires, sync))
    ring.close()


def reads_one_bucket(pipe: Connection, path: str, wires: Sequence[WireTensor], then: str) -> None:
    """Takes bucket 0, says so, and then `sleeps`, beating, or `fails`."""
    ring = open_reader(path, wires)
    ring.begin(1)
    with beating(ring):
        ring.take(layouts_of(wires)[0], sync=1, seconds=30, lost_after=30)
        if then == "fails":
            ring.fail("EngineError: lm_head.weight has another shape")
        pipe.send("took bucket 0")
        time.sleep(60)


def writes(pipe: Connection, tensors: dict[str, Tensor], then: str) -> None:
    """Sends bucket 0 of sync 1, says so, and then only beats, or aborts when told to."""
    wires = wires_of(tensors)
    ring = RingWriter(label="test", slot_sizes=slot_sizes(layouts_of(wires)), peer="worker 0")
    pipe.send(str(ring.path))
    try:
        with beating(ring):
            write_sync(ring, tensors, 1, buckets=1)
            pipe.send("sent bucket 0")
            if then == "aborts":
                pipe.recv()
                ring.abort("ControlLostError: rank 1 has been silent")
            pipe.recv()
    finally:
        ring.close()


def try_to_read(ring: RingReader, wires: Sequence[WireTensor], **bounds: float) -> WeightlaneError:
    try:
        read_sync(ring, wires, 1, **bounds)
    except WeightlaneError as error:
        return error
    raise AssertionError("the sync came through")


def words_of(ring: Ring) -> memoryview:
    return ring._words
