"""An engine started anew under an adapter lane: its base is checked again, then it is brought level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from adapter_models import apart, engine_says, moved

from weightlane.errors import PlanError, SyncError
from weightlane.reference.worker import ReferenceWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane
    from weightlane.reference.engine import ReferenceEngine


@pytest.fixture
def engine(model_folder: str) -> ReferenceEngine:
    """One for each test: they change its base."""
    from weightlane.reference.engine import ReferenceEngine

    return ReferenceEngine(model_folder)


def start_anew(engine: ReferenceEngine) -> None:
    """What a restart leaves of an engine object: the base, another incarnation, no agent, no version."""
    from weightlane.reference.adapters import AdapterShelf

    vars(engine).pop("_weightlane_agent", None)
    engine._version = engine._writing = None
    engine.worker = ReferenceWorker(engine)
    engine._adapters = AdapterShelf(engine.model, engine.worker.live_names)


def test_the_same_base_is_taken_back_and_brought_level(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, engine)
    lane.sync(1)
    start_anew(engine)
    moved(policy, seed=2)
    assert lane.sync(2).rejoined == (0,)
    assert apart(policy, engine_says(lane, adapter=lane.adapter_ref())) <= 1e-4


@pytest.mark.usefixtures("base_stays")
def test_another_base_is_refused_by_name(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    lane = open_lane(policy, engine)
    lane.sync(1)
    with torch.no_grad():
        engine.model.model.norm.weight.add_(1.0)
    start_anew(engine)
    with pytest.raises(PlanError, match=r"model\.norm\.weight"):
        lane.sync(2)


@pytest.mark.usefixtures("base_stays")
def test_a_base_that_was_lost_in_sleep_takes_no_adapter(
    policy: Any, engine: ReferenceEngine, open_lane: Callable[..., Lane]
) -> None:
    with pytest.raises(PlanError, match="does not bring back the base"):
        open_lane(policy, engine, release=("weights",))
    lane = open_lane(policy, engine, release=("kv_cache",))
    lane.sync(1)
    lane.sleep()
    lane.sync(2)
    assert engine.memory.released == ()
    engine.sleep(("weights",))
    engine.wake(("weights",))
    with pytest.raises(SyncError, match="has no base for the adapter"):
        lane.sync(3)
