"""Whatever way a lane takes: the same tensors arrive, a bucket at a time, and errors come back."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transport_rig import BUCKET_BYTES, BY_AGENT, WAYS, FakeReceiver, described, rig_of

from weightlane.agent import WorkerAgent
from weightlane.buckets import slot_sizes
from weightlane.errors import EngineError, SyncError

if TYPE_CHECKING:
    from torch import Tensor
    from transport_rig import Rig

SLOTS = 2


def awkward() -> dict[str, Tensor]:
    """An odd length, three halves before a float, views, nothing, a scalar, and more than a bucket holds."""
    base = torch.arange(48.0).reshape(6, 8)
    return {
        "odd": torch.arange(3, dtype=torch.uint8),
        **{f"half {number}": torch.full((1,), number + 0.5, dtype=torch.float16) for number in range(3)},
        "float": torch.tensor([1.25, -2.5]),
        "transposed": base.t()[:3],
        "strided": base[::2, 1:4],
        "expanded": torch.tensor([7.0]).expand(5),
        "nothing": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "larger than a bucket": torch.arange(200, dtype=torch.int32),
        "after it": torch.tensor([True, False]),
    }


def equal_buckets(count: int = 8) -> dict[str, Tensor]:
    return {f"w{number}": torch.full((60,), float(number)) for number in range(count)}


def whole_sync(rig: Rig, sync: int = 1) -> None:
    digest = rig.move(sync, sync + 10)
    for report in rig.reports(sync):
        assert (report.tensors, report.loaded) == (len(rig.plan.tensors), len(rig.plan.tensors))
        assert report.digest == digest
    rig.session.publish(sync, sync + 10)


@pytest.mark.requirement("R60")
@pytest.mark.requirement("R62")
@pytest.mark.requirement("R63")
@pytest.mark.requirement("R67", part="full weights")
@pytest.mark.parametrize("way", WAYS)
def test_names_shapes_dtypes_and_bytes_are_the_same_every_way(way: str) -> None:
    sent = awkward()
    largest = max(tensor.numel() * tensor.element_size() for tensor in sent.values())
    assert largest > BUCKET_BYTES
    with rig_of(sent, way) as rig:
        whole_sync(rig)
        assert rig.receiver.arrived == [described(name, tensor) for name, tensor in sent.items()]


@pytest.mark.requirement("R67", part="full weights")
def test_one_manifest_and_one_layout_whatever_the_transport() -> None:
    plans = []
    for way in BY_AGENT:
        with rig_of(awkward(), way) as rig:
            received = rig.plan.receive_plan(0, ())
            assert received.plan_digest == rig.plan.digest(), "which covers manifest, mode and phase"
            plans.append((rig.plan.manifest, rig.plan.phase, received.tensors, received.buckets))
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.requirement("R58")
@pytest.mark.parametrize("way", WAYS)
def test_each_bucket_is_applied_before_the_trainer_has_to_give_many_more(way: str) -> None:
    sent = equal_buckets()
    with rig_of(sent, way) as rig:
        assert len(rig.plan.buckets) == len(sent)
        if rig.ring:
            assert sum(slot_sizes(rig.plan.buckets)) < sum(layout.nbytes for layout in rig.plan.buckets)
        whole_sync(rig)
        assert [names for names, _ in rig.receiver.loads] == [(name,) for name in sent]
        # Over a ring the trainer may be ahead by what its slots hold and one more that waits for a slot. Over
        # a folder all buckets lie on the disk before the first is loaded, and one at a time is in memory.
        ahead = {"shm": SLOTS + 1, "cuda_ipc": SLOTS + 1, "disk": len(sent)}.get(way, 1)
        assert not too_far_ahead(rig.receiver, ahead)


def too_far_ahead(receiver: FakeReceiver, ahead: int) -> list[int]:
    """Buckets before whose load the trainer had been asked for more than `ahead` from there on."""
    return [number for number, (_, asked) in enumerate(receiver.loads) if asked > number + ahead]


@pytest.mark.parametrize("way", BY_AGENT)
def test_control_an_agent_that_collects_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = WorkerAgent._load
    kept: list[tuple[str, Tensor]] = []

    def collect(self: WorkerAgent, opened: Any, layout: Any, tensors: Any) -> None:
        kept.extend((name, tensor.clone()) for name, tensor in tensors)
        apply(self, opened, layout, kept if layout.last else [])

    monkeypatch.setattr(WorkerAgent, "_load", collect)
    with rig_of(equal_buckets(), way) as rig:
        rig.move(1, 11)
        rig.reports(1)
        assert [len(names) for names, _ in rig.receiver.loads] == [8]
        assert too_far_ahead(rig.receiver, SLOTS + 1)


@pytest.mark.requirement("R59")
@pytest.mark.parametrize("way", WAYS)
def test_an_empty_last_bucket_finishes_the_sync(way: str) -> None:
    with rig_of({}, way) as rig:
        (layout,) = rig.plan.buckets
        assert (layout.last, layout.entries) == (True, ())
        whole_sync(rig)
        expected = [] if way == "request" else ["begin 11", "finish 11", "publish 11"]
        assert rig.receiver.calls == expected
        assert rig.endpoint.lasts == ([True] if way == "request" else [])


@pytest.mark.requirement("R59")
def test_an_engine_s_own_requests_are_told_which_bucket_is_the_last() -> None:
    with rig_of(equal_buckets(3), "request") as rig:
        whole_sync(rig)
        assert rig.endpoint.lasts == [False, False, True]


# The ring carries the cause as text, an agent's answer as a typed error; in one process it is the cause.
RAISED = {"shm": SyncError, "cuda_ipc": SyncError, "inline": EngineError}


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("way", WAYS)
def test_a_receiver_that_fails_at_a_bucket_ends_the_sender_s_call_with_its_words(way: str) -> None:
    with rig_of(equal_buckets(), way) as rig:
        rig.receiver.fails_at_load = 2
        started = time.monotonic()
        if way == "disk":
            rig.move(1, 11)  # the worker reads what lies there whole; its report tells
        else:
            with pytest.raises(RAISED.get(way, KeyError), match=r"lm_head\.weight is not here"):
                rig.move(1, 11)
            assert rig.stream.asked <= 2 + SLOTS + 1 + 1, "the stream was not drained into nothing"
        assert time.monotonic() - started < 10
        if way in ("shm", "cuda_ipc", "disk"):
            with pytest.raises(EngineError, match=r"lm_head\.weight is not here"):
                rig.reports(1)
        rig.receiver.fails_at_load = -1
        rig.receiver.arrived.clear()
        rig.stream.asked = 0
        whole_sync(rig, 2)
        assert len(rig.receiver.arrived) == 8, "the next sync is whole"


def alive_at_release(rig: Rig) -> list[bool]:
    """Runs a sync over a ring; per release, whether anything still refers to the bucket's tensors."""
    handed: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    keep = rig.receiver.keep

    def noting(tensors: Any) -> None:
        handed[:] = [weakref.ref(tensor) for _, tensor in tensors]
        keep(tensors)

    ring: Any = rig.endpoint.agent._attached["lane-1"].ring
    release = ring.release

    def released(layout: Any, **options: Any) -> None:
        alive.append(any(reference() is not None for reference in handed))
        release(layout, **options)

    rig.receiver.keep = noting  # type: ignore[method-assign]
    ring.release = released
    rig.move(1, 11)
    rig.reports(1)
    return alive


@pytest.mark.requirement("R61")
@pytest.mark.parametrize("way", ["shm", "cuda_ipc"])
def test_a_slot_is_released_after_the_last_reference_into_it_is_gone(way: str) -> None:
    with rig_of(equal_buckets(), way) as rig:
        assert alive_at_release(rig) == [False] * 8
        assert {name: tensor[0].item() for name, tensor in rig.receiver.held.items()} == {
            f"w{number}": number for number in range(8)
        }


@pytest.mark.parametrize("way", ["shm", "cuda_ipc"])
def test_control_a_receiver_that_keeps_references_reads_later_buckets_in_them(way: str) -> None:
    with rig_of(equal_buckets(), way) as rig:
        rig.receiver.keep = rig.receiver.held.update  # type: ignore[method-assign]
        assert alive_at_release(rig) == [True] * 8
        assert {name: tensor[0].item() for name, tensor in rig.receiver.held.items()} == {
            f"w{number}": 6 + number % SLOTS for number in range(8)
        }
        rig.receiver.held.clear()
