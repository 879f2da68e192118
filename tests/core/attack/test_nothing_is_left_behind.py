"""After a thousand syncs, failed syncs, lanes come and gone and trainers killed: what was there before."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_engine import WEIGHTS, WIRES, FakeWorkerEngine, agent_of_fake, ask, plan
from resources import LABEL, held, ring_mappings, ring_names
from ring_victims import LAYOUTS, SIZES, makes_rings

from weightlane.errors import SyncError, WeightlaneError
from weightlane.messages import Attach, Detach, Publish, Receive
from weightlane.packing import WireDigest, pack_bucket
from weightlane.ring import RingWriter
from weightlane.waiting import nothing_to_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from weightlane.agent import WorkerAgent

VALUES = [tensor.clone() for tensor in WEIGHTS.values()]  # changed here, and WEIGHTS are every test's
BOUNDS = {"seconds": 30.0, "lost_after": 30.0}


@contextmanager
def lane(agent: WorkerAgent, name: str = "lane-1") -> Iterator[RingWriter]:
    """A ring that the agent reads, as a lane opens and closes it."""
    writer = RingWriter(label=f"{LABEL}-{name}", slot_sizes=SIZES, peer="worker 0")
    try:
        ask(agent, Attach(plan(lane=name, transport="shm", ring={0: str(writer.path)})))
        writer.hide()
        yield writer
        ask(agent, Detach(name))
    finally:
        writer.close()


def receive(sync: int, name: str = "lane-1") -> Receive:
    return Receive(name, "p1", sync, sync, {0: "first"}, 30.0, 30.0)


def send(writer: RingWriter, sync: int, *, buckets: int | None = None) -> str:
    digest = WireDigest(WIRES)
    writer.begin(sync)
    for layout in LAYOUTS[:buckets]:
        slot = writer.acquire(layout, sync=sync, check=nothing_to_check, **BOUNDS)
        pack_bucket(slot, layout, WIRES, [(entry.tensor, VALUES[entry.tensor]) for entry in layout.entries])
        digest.update(writer.slot_memory(layout), layout)
        del slot
        writer.post(layout, sync=sync)
        writer.beat()
    if buckets is None:
        writer.drain(sync=sync, check=nothing_to_check, **BOUNDS)
    return digest.hexdigest()


def one_sync(worker: Executor, agent: WorkerAgent, writer: RingWriter, sync: int) -> None:
    VALUES[0].fill_(float(sync))
    answer = worker.submit(ask, agent, receive(sync))
    sent = send(writer, sync)
    report = answer.result(30.0)
    assert (report.sync, report.digest) == (sync, sent)
    ask(agent, Publish("lane-1", sync, sync))
    assert agent.held_version == sync


def test_a_thousand_syncs_leave_nothing() -> None:
    engine = FakeWorkerEngine()
    agent = agent_of_fake(engine)
    with ThreadPoolExecutor(1) as worker, lane(agent) as writer:
        for sync in range(1, 101):
            one_sync(worker, agent, writer, sync)
        before = held()
        for sync in range(101, 1101):
            one_sync(worker, agent, writer, sync)
            engine.calls.clear()
        after = held()
        assert torch.equal(engine.held["a"], torch.full((3,), 1100.0))
    assert (after.files, after.threads) == (before.files, before.threads)
    assert after.processes == before.processes
    assert (before.ring_names, after.ring_names) == (0, 0)
    assert after.ring_mappings == before.ring_mappings == 2
    # A leak of one bucket a sync (64 bytes) would hide in this; one of a ring, thread or message would not.
    assert after.resident_mib - before.resident_mib < 4
    assert ring_mappings() == 0


def test_a_leak_would_be_seen() -> None:
    # The control of all tests here: what each figure looks like when something does stay.
    before = held()
    writer = RingWriter(label=f"{LABEL}-kept", slot_sizes=SIZES, peer="worker 0")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    child = subprocess.Popen(["/bin/sh", "-c", "exit"], close_fds=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for: a zombie
    after = held()
    child.wait(10)
    stop.set()
    thread.join()
    writer.close()
    assert after.files > before.files
    assert after.threads == before.threads + 1
    assert after.processes == before.processes + 1
    assert after.ring_names == before.ring_names + 1
    assert after.ring_mappings == before.ring_mappings + 1


def test_syncs_that_fail_on_either_side_leave_nothing() -> None:
    agent = agent_of_fake(engine := FakeWorkerEngine())
    with ThreadPoolExecutor(1) as worker, lane(agent) as writer:
        worker.submit(held).result()  # a pool starts its thread with its first task
        before = held()
        for sync in range(1, 61):
            engine.raises = {} if sync % 2 else {"load_weights": ValueError("it does not fit")}
            answer = worker.submit(ask, agent, receive(sync))
            send(writer, sync, buckets=1)
            if sync % 2:
                writer.abort("a rank died")
            else:
                with pytest.raises(SyncError, match="it does not fit"):
                    writer.drain(sync=sync, check=nothing_to_check, **BOUNDS)
            with pytest.raises(WeightlaneError, match="a rank died" if sync % 2 else "it does not fit"):
                answer.result(30.0)
        engine.raises = {}
        one_sync(worker, agent, writer, 61)
        after = held()
    assert (after.files, after.threads, after.processes, after.ring_mappings) == (
        before.files,
        before.threads,
        before.processes,
        before.ring_mappings,
    )


def test_lanes_that_come_and_go_leave_nothing() -> None:
    agent = agent_of_fake(FakeWorkerEngine())
    before = held()
    for number in range(60):
        with lane(agent, f"lane-{number}"):
            pass
    after = held()
    assert (after.files, after.processes, after.ring_names, after.ring_mappings) == (
        before.files,
        before.processes,
        before.ring_names,
        before.ring_mappings,
    )


def test_a_loader_that_keeps_views_keeps_their_memory_and_nothing_else() -> None:
    agent = agent_of_fake(engine := FakeWorkerEngine())
    engine.keeps_views = True
    before = held()
    with ThreadPoolExecutor(1) as worker, lane(agent) as writer:
        answer = worker.submit(ask, agent, receive(1))
        send(writer, 1)
        answer.result(30.0)
    # The worker's mapping is still there: without it, the next line would end the process.
    assert ring_mappings() == before.ring_mappings + 1
    assert all(torch.equal(engine.held[name], value) for name, value in zip(WEIGHTS, VALUES, strict=True))
    engine.held.clear()
    after = held()
    assert (after.files, after.ring_mappings) == (before.files, before.ring_mappings)


# -- killed trainers ----------------------------------------------------------------------------------------


def test_one_killed_before_its_reader_attached_leaves_a_name_until_the_next_ring(
    start_peer: Callable[..., Any],
) -> None:
    with start_peer(makes_rings, False) as killed, start_peer(makes_rings, False) as alive:
        left, kept = (peer.told().rpartition("/")[2] for peer in (killed, alive))
        killed.process.kill()
        killed.process.join(10)
        assert {left, kept} <= ring_names()
        RingWriter(label=LABEL, slot_sizes=SIZES, peer="worker 0").close()
        # The living one's ring has the same look, but for the lock on it.
        assert ring_names() & {left, kept} == {kept}


def test_one_killed_after_its_reader_attached_leaves_no_name(start_peer: Callable[..., Any]) -> None:
    with start_peer(makes_rings, True) as peer:
        path = peer.told()
        peer.pipe.send("attached")
        assert peer.told() == "hidden"
        peer.process.kill()
        peer.process.join(10)
        assert path.rpartition("/")[2] not in ring_names()


def test_the_memory_of_killed_trainers_rings_is_let_go_when_the_next_one_attaches(
    start_peer: Callable[..., Any],
) -> None:
    agent = agent_of_fake(FakeWorkerEngine())
    with start_peer(makes_rings, False):
        pass  # what starts peers is a process too, and is there from now on
    before = held()
    for number in range(3):
        with start_peer(makes_rings, True) as peer:
            ring = {0: peer.told()}
            ask(agent, Attach(plan(lane=f"lane-{number}", transport="shm", ring=ring)))
            peer.pipe.send("attached")
            assert peer.told() == "hidden"
            assert ring_mappings() == before.ring_mappings + 1
            peer.process.kill()
            peer.process.join(10)
    with lane(agent, "the next"):
        # Its own two ends, and nothing of the three before.
        assert ring_mappings() == before.ring_mappings + 2
    after = held()
    assert (after.files, after.processes, after.ring_mappings) == (
        before.files,
        before.processes,
        before.ring_mappings,
    )


def test_a_sync_whose_trainer_was_killed_lets_go_of_the_ring_at_once(start_peer: Callable[..., Any]) -> None:
    agent = agent_of_fake(FakeWorkerEngine())
    before = held()
    with start_peer(makes_rings, True) as peer:
        ask(agent, Attach(plan(transport="shm", ring={0: peer.told()})))
        peer.pipe.send("attached")
        peer.told()
        peer.process.kill()
        peer.process.join(10)
        with pytest.raises(SyncError, match="has been silent"):
            ask(agent, Receive("lane-1", "p1", 1, 1, {0: "first"}, 30.0, 0.2))
    assert held().ring_mappings == before.ring_mappings
    with pytest.raises(SyncError, match="it holds none"):
        ask(agent, receive(2))
