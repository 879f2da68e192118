"""Read-back compares values where the table says: an engine that repacks in place at one shape is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packing_engine import FakePackingEngine, weights
from planning_rig import plan_for

from weightlane.agent import WorkerAgent
from weightlane.errors import NotServableError, PlanError, ProtocolError, VerificationError
from weightlane.failures import Failure, error_of
from weightlane.messages import (
    AgentReply,
    AgentRequest,
    Attach,
    BeginInline,
    FinishInline,
    LoadInline,
    Publish,
    ReadBack,
    ReceivePlan,
    ReceiveReport,
    Trace,
    decode,
    encode,
)
from weightlane.packing import memory_of, pack_bucket


class Lane:
    """One worker, planned and attached; syncs by value."""

    def __init__(self, engine: Any, **fields: Any) -> None:
        self.engine = engine
        self.agent = WorkerAgent(lambda backend: engine, origin="worker 0")
        plan = plan_for([engine], **fields)
        self.received = plan.receive_plan(0, ())
        self.ask(Trace(self.received.backend, _asked(engine)))  # as planning did, of another agent
        self.ask(Attach(self.received))

    def ask(self, request: AgentRequest) -> Any:
        reply: AgentReply = decode(self.agent.handle(encode(request)), AgentReply, sender="the fake")
        if isinstance(reply, Failure):
            raise error_of(reply)
        return reply

    def sync(self, number: int, seed: int = 0) -> ReceiveReport:
        plan = self.received
        values = list(weights(seed).values())
        self.ask(BeginInline("lane-1", plan.plan_digest, number, number, {0: self.engine.incarnation}))
        for layout in plan.buckets:
            memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
            tensors = [(entry.tensor, values[entry.tensor]) for entry in layout.entries]
            pack_bucket(memory, layout, plan.tensors, tensors)
            self.ask(LoadInline("lane-1", number, layout.index, bytes(memory_of(memory))))
        report: ReceiveReport = self.ask(FinishInline("lane-1", number))
        return report

    def publish(self, number: int) -> None:
        self.ask(Publish("lane-1", number, number))


def _asked(engine: FakePackingEngine) -> Any:
    from packing_engine import WIRES

    return WIRES


def repacking() -> FakePackingEngine:
    engine = FakePackingEngine()
    engine.repacks = True
    return engine


def test_what_was_sent_is_found_where_the_table_says() -> None:
    lane = Lane(FakePackingEngine())
    report = lane.sync(1)
    assert report.read_back == ReadBack(elements=108 + 8)
    lane.publish(1)
    assert lane.agent.servable


def test_experts_repacked_in_place_at_the_same_shape_are_caught_before_publishing() -> None:
    lane = Lane(repacking())
    with pytest.raises(VerificationError) as caught:
        lane.sync(1)
    assert (
        "in experts (from experts.0.up_proj.weight, experts.1.up_proj.weight; 2 of 2 placements differ)"
        in (caught.value.what)
    )
    assert "qkv_proj" not in str(caught.value)
    assert "repacked" in caught.value.why
    assert "publish" not in lane.engine.writes
    with pytest.raises(NotServableError, match="is not what was sent"):
        lane.agent.require_servable()


def test_without_reading_back_nothing_is_seen() -> None:
    # The control: every count is right, and the experts are each other's.
    lane = Lane(repacking(), read_back="never")
    report = lane.sync(1)
    lane.publish(1)
    assert (report.tensors, report.loaded, report.read_back) == (7, 7, None)
    assert lane.agent.servable
    assert torch.equal(lane.engine.model.experts[0], weights()["experts.1.up_proj.weight"])


def test_the_first_sync_is_read_back_and_later_ones_when_asked() -> None:
    for policy, later in (("first", None), ("always", ReadBack(116))):
        lane = Lane(FakePackingEngine(), read_back=policy)
        assert lane.sync(1).read_back == ReadBack(116)
        lane.publish(1)
        assert lane.sync(2, seed=1).read_back == later


def test_a_first_sync_that_failed_is_not_the_first() -> None:
    lane = Lane(repacking())
    with pytest.raises(VerificationError):
        lane.sync(1)
    lane.engine.repacks = False
    assert lane.sync(2).read_back == ReadBack(116)
    lane.publish(2)
    assert lane.agent.servable


def test_each_worker_reads_back_its_own_shard() -> None:
    engines = [FakePackingEngine(0, 2), FakePackingEngine(1, 2)]
    tables = plan_for(engines).receive_plan(0, ()).tables
    assert len(set(tables.values())) == 2
    engine = FakePackingEngine(1, 2)
    engine.describe = lambda: FakePackingEngine(1, 2).describe()  # type: ignore[method-assign]
    from packing_engine import WIRES

    from weightlane.trace.read_back import ReadBackCheck

    check = ReadBackCheck(engine.trace(WIRES), origin="worker 1")
    check.arrived(list(weights().items()))
    engine.load_weights(list(weights().items()))
    found = check.require_equal(engine.live_tensors())
    assert found.elements == 3 * 8 + 2 * 8 + 4 + 24 + 8
    with torch.no_grad():
        engine.model.qkv_proj[0, 0] += 1.0
    with pytest.raises(VerificationError, match=r"qkv_proj \(from q_proj.weight; 1 of 3 placements differ\)"):
        check.require_equal(engine.live_tensors())


def _checked(engine: FakePackingEngine) -> Any:
    from packing_engine import WIRES

    from weightlane.trace.read_back import ReadBackCheck

    check = ReadBackCheck(engine.trace(WIRES), origin="worker 0")
    check.arrived(list(weights().items()))
    engine.load_weights(list(weights().items()))
    return check


def test_padding_that_is_no_constant_any_more_is_caught() -> None:
    engine = FakePackingEngine()
    check = _checked(engine)
    with torch.no_grad():
        engine.model.embed[7, 3] = 1.0
    with pytest.raises(VerificationError, match=r"in embed \(its padding\)"):
        check.require_equal(engine.live_tensors())


def test_a_fill_that_the_loader_wrote_over_is_compared_where_it_is_left() -> None:
    class FakeZeroingEngine(FakePackingEngine):
        def load(self, tensors: Any) -> None:
            for name, tensor in tensors:
                if name != "embed.weight":
                    super().load([(name, tensor)])
                else:
                    self.model.embed.zero_()
                    self.model.embed[: tensor.shape[0]].copy_(tensor)

    engine = FakeZeroingEngine()
    check = _checked(engine)
    assert check.require_equal(engine.live_tensors()).elements == 116
    with torch.no_grad():
        engine.model.embed[6, 0] = -1.0
    with pytest.raises(VerificationError, match=r"in embed \(its padding\)"):
        check.require_equal(engine.live_tensors())


@pytest.mark.parametrize("changed", ["shape", "gone"])
def test_a_tensor_that_is_another_one_now_is_told(changed: str) -> None:
    engine = FakePackingEngine()
    check = _checked(engine)
    live = dict(engine.live_tensors())
    if changed == "gone":
        del live["norm"]
    else:
        live["norm"] = live["norm"].reshape(2, 2)
    told = "norm .is gone" if changed == "gone" else r"norm .is now bfloat16 of shape \[2, 2\]"
    with pytest.raises(VerificationError, match=told):
        check.require_equal(live)


def test_targets_that_are_kept_in_another_form_are_counted_apart() -> None:
    from msgspec.structs import replace
    from packing_engine import WIRES

    from weightlane.trace.read_back import ReadBackCheck

    engine = FakePackingEngine()
    table = engine.trace(WIRES)
    targets = tuple(
        replace(target, form="checkpoint") if target.name == "experts" else target for target in table.targets
    )
    check = ReadBackCheck(replace(table, targets=targets), origin="worker 0")
    check.arrived(list(weights().items()))
    engine.load_weights(list(weights().items()))
    engine.repacks = True
    engine.finish(1)
    assert check.require_equal(engine.live_tensors()) == ReadBack(116 - 32, not_comparable=32)


# -- asked for where it cannot be ---------------------------------------------------------------------------


def test_a_plan_whose_table_the_worker_does_not_hold_is_refused() -> None:
    engine = FakePackingEngine()
    received: ReceivePlan = plan_for([engine]).receive_plan(0, ())
    agent = WorkerAgent(lambda backend: engine, origin="worker 0")
    reply: Any = decode(agent.handle(encode(Attach(received))), AgentReply, sender="the fake")
    with pytest.raises(ProtocolError, match=f"does not hold table {received.tables[0]}"):
        raise error_of(reply)


def test_reading_back_at_every_sync_is_refused_where_nothing_was_traced() -> None:
    class FakeQuiet:
        inner = FakePackingEngine()

        def __getattr__(self, name: str) -> Any:
            if name in ("trace", "live_tensors"):
                raise AttributeError(name)
            return getattr(self.inner, name)

    with pytest.raises(
        PlanError, match=r"\[read-back\] replica 0: here cannot be read back: FakeQuiet of"
    ) as e:
        plan_for([FakeQuiet()], read_back="always")
    assert len(e.value.problems) == 1
    assert plan_for([FakeQuiet()]).read_back == "first"
