"""Mode adapter to engines of another base: it is sent once, asked for before each sync, and never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_models import apart, engine_says, make_base, moved, wrapped

from weightlane.errors import EngineError, NotServableError, PlanError, SyncError, VerificationError
from weightlane.front import gate
from weightlane.reference.adapters import AdapterShelf
from weightlane.reference.engine import ReferenceEngine
from weightlane.residency import ReplicaResidency
from weightlane.torch_trainer import describe
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane
    from weightlane.lane_messages import SyncReport


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("other") / "model"
    make_base(seed=5).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def other(other_folder: str) -> ReferenceEngine:
    """An engine that was started from another checkpoint of the same shape."""
    return ReferenceEngine(other_folder)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gate.ServingGate.generation
    monkeypatch.setattr(gate.ServingGate, "generation", lambda self: whole(self, 0.05))


def phases(report: SyncReport) -> list[str]:
    return [phase.phase.value for phase in report.phases]


def base_of(engine: ReferenceEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}


def base_of_policy(policy: Any) -> dict[str, torch.Tensor]:
    return {
        name.replace(".base_layer", "").removeprefix("base_model.model."): tensor.clone()
        for name, tensor in policy.state_dict().items()
        if ".lora_" not in name
    }


def bitwise_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("transport", ["inprocess", "inline", "shm", "disk"])
def test_the_base_is_sent_once_then_adapters_alone_and_it_stays_bit_by_bit(
    policy: Any, other: ReferenceEngine, open_lane: Callable[..., Lane], transport: str
) -> None:
    lane = open_lane(policy, other, transport=transport)
    plan = lane.plan()
    assert plan.base is not None
    assert (plan.phase, plan.base.phase) == (Phase.ADAPTER, Phase.BASE)
    assert "sent to whoever does not hold it" in str(plan)
    assert "adapter, phase base from weightlane/torch" in str(plan)
    first = lane.sync(1)
    assert phases(first) == ["base", "adapter"]
    sent = first.phases[0]
    assert (sent.replicas, sent.tensors, sent.nbytes) == ((0,), len(plan.base.tensors), plan.base.nbytes)
    assert "worker 0 holds no base" in sent.why[0]
    assert "counts equal on 1 worker" in sent.verified[0]
    assert "read back equal" in sent.verified[0]
    assert first.nbytes == first.phases[1].nbytes == plan.nbytes < sent.nbytes
    assert bitwise_equal(base_of(other), base_of_policy(policy))
    assert apart(policy, engine_says(lane)) <= 1e-4
    for version in (2, 3, 4):
        assert moved(policy, seed=version) >= 1e-2
        assert phases(lane.sync(version)) == ["adapter"]
        assert apart(policy, engine_says(lane)) <= 1e-4
        assert bitwise_equal(base_of(other), base_of_policy(policy))


def test_of_two_replicas_the_one_that_holds_it_is_left_alone_and_serves_on(
    policy: Any, other: ReferenceEngine, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, engine, other)
    report = lane.stage(1)
    assert [phase.replicas for phase in report.phases] == [(1,), (0, 1)]
    assert [replica.servable for replica in lane.state.replicas] == [True, False]
    lane.commit()
    assert [replica.servable for replica in lane.state.replicas] == [True, True]
    assert engine_says(lane) == engine_says(lane, 1)
    assert apart(policy, engine_says(lane)) <= 1e-4


# -- residency is asked, never assumed ------------------------------------------------------------------


def start_anew(engine: ReferenceEngine, seed: int) -> None:
    """What a restart from another checkpoint leaves of an engine object."""
    from weightlane.reference.worker import ReferenceWorker

    engine.model.load_state_dict(make_base(seed=seed).state_dict())
    vars(engine).pop("_weightlane_agent", None)
    engine._version = engine._writing = None
    engine.worker = ReferenceWorker(engine)
    engine._adapters = AdapterShelf(engine.model, engine.worker.live_names)


def lost_in_sleep(engine: ReferenceEngine, lane: Lane, open_lane: Callable[..., Lane]) -> None:
    engine.sleep(("weights",))
    engine.wake(("weights",))


def written_by_another_lane(engine: ReferenceEngine, lane: Lane, open_lane: Callable[..., Lane]) -> None:
    full = open_lane(make_base(seed=6), engine, mode="full", bucket_bytes=1 << 20)
    full.sync(7)
    with pytest.raises(EngineError, match="no adapter 'default@1'"):
        engine_says(lane)


def restarted(engine: ReferenceEngine, lane: Lane, open_lane: Callable[..., Lane]) -> None:
    start_anew(engine, 7)


@pytest.mark.parametrize("event", [lost_in_sleep, written_by_another_lane, restarted])
def test_whatever_became_of_the_base_it_is_sent_again_and_said_so(
    policy: Any,
    other: ReferenceEngine,
    open_lane: Callable[..., Lane],
    event: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    lane = open_lane(policy, other)
    lane.sync(1)
    event(other, lane, open_lane)
    moved(policy, seed=2)
    caplog.clear()
    report = lane.sync(2)
    assert phases(report) == ["base", "adapter"]
    assert "base: 21 tensors" in caplog.text
    assert report.rejoined == ((0,) if event is restarted else ())
    assert bitwise_equal(base_of(other), base_of_policy(policy))
    assert apart(policy, engine_says(lane)) <= 1e-4
    assert phases(lane.sync(3)) == ["adapter"]


def test_weights_that_the_lane_itself_lets_go_come_back_with_the_next_sync(
    policy: Any, engine: ReferenceEngine, model_folder: str, open_lane: Callable[..., Lane]
) -> None:
    asleep = ReferenceEngine(model_folder)
    lane = open_lane(policy, asleep, release=("weights", "kv_cache"))
    assert phases(lane.sync(1)) == ["adapter"]
    lane.sleep()
    assert asleep.memory.released == ("weights", "kv_cache")
    with pytest.raises(NotServableError):
        engine_says(lane)
    assert phases(lane.sync(2)) == ["base", "adapter"]
    assert asleep.memory.released == ()
    assert apart(policy, engine_says(lane)) <= 1e-4


def test_a_trainer_that_cannot_tell_values_sends_it_at_the_first_sync_whatever_is_there(
    policy: Any,
    engine: ReferenceEngine,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(describe, "_base_digests", lambda context: {})
    lane = open_lane(policy, engine)
    assert "known to this lane alone" in str(lane.plan())
    assert [phases(lane.sync(version)) for version in (1, 2)] == [["base", "adapter"], ["adapter"]]
    with open_lane(wrapped(engine.model_path, name="critic"), engine, adapter="critic") as second:
        assert phases(second.sync(1)) == ["base", "adapter"], "another lane's base is another base"


@pytest.mark.requirement("R14")
def test_control_an_adapter_is_not_put_on_another_base_where_nobody_asks(
    policy: Any,
    other: ReferenceEngine,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule undone: the controller takes the base for sent. The worker itself refuses before any load."""
    lane = open_lane(policy, other)
    with monkeypatch.context() as undone:
        undone.setattr(ReplicaResidency, "why_no_base", lambda self, identity: "")
        with pytest.raises(SyncError, match=r"does not hold the base.*Sync again: it is sent again"):
            lane.sync(1)
    assert phases(lane.sync(2)) == ["base", "adapter"]


# -- a failure between the two --------------------------------------------------------------------------


@pytest.mark.requirement("R68")
@pytest.mark.parametrize("swap", ["two_slot", "paused"])
@pytest.mark.parametrize("transport", ["inprocess", "shm"])
def test_a_base_without_its_adapter_serves_nobody(
    policy: Any,
    other: ReferenceEngine,
    open_lane: Callable[..., Lane],
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
    transport: str,
) -> None:
    from weightlane.adapters import AdapterBinding

    lane = open_lane(policy, other, swap=swap, transport=transport)
    lane.sync(1)
    with pytest.MonkeyPatch.context() as broken:
        lost_in_sleep(other, lane, open_lane)
        broken.setattr(AdapterShelf, "_binding", lambda self, slot: AdapterBinding(slot.ref, ()))
        with pytest.raises(VerificationError, match="are fenced until a sync succeeds"):
            lane.sync(2)
    assert lane.state.replicas[0].servable is not True
    with pytest.raises(NotServableError):
        engine_says(lane)
    with pytest.raises(NotServableError):
        engine_says(lane, adapter=None)
    assert other._adapters._slots == {}, "the old adapter belonged to the old base"
    assert phases(lane.sync(3)) == ["base", "adapter"]
    assert apart(policy, engine_says(lane)) <= 1e-4


def test_between_stage_and_commit_nothing_is_served_on_a_new_base(
    policy: Any, other: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, other)
    lane.stage(1)
    for adapter in (None, "default@1"):
        with pytest.raises(NotServableError):
            engine_says(lane, adapter=None if adapter is None else _ref(adapter))
    lane.commit()
    assert apart(policy, engine_says(lane)) <= 1e-4


def _ref(name: str) -> Any:
    from weightlane.adapters import AdapterRef

    return AdapterRef(name, 1)


@pytest.mark.usefixtures("base_stays")
def test_where_the_base_cannot_be_sent_the_plan_says_why_and_what_to_do(
    policy: Any, other: ReferenceEngine, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    with pytest.raises(PlanError) as caught:
        open_lane(policy, other)
    told = str(caught.value)
    assert "the lane cannot send it, because this trainer cannot export phase base" in told
    assert "Start the engine from the checkpoint that the trainer's base was loaded from" in told
    lane = open_lane(policy, engine)
    assert lane.plan().base is None
    assert "must be held already, since this trainer cannot export phase base" in str(lane.plan())
    assert phases(lane.sync(1)) == ["adapter"]
