"""The reference engine asleep: memory is really gone, only what was released comes back, not to serve."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from weightlane.errors import EngineError, NotServableError, SyncError
from weightlane.messages import Generate
from weightlane.reference.engine import ReferenceEngine

PROBE = Generate(((1, 2, 3),), 2)


@pytest.fixture
def engine(untied_folder: str) -> ReferenceEngine:
    return ReferenceEngine(untied_folder)


def sync(engine: ReferenceEngine, weights: dict[str, Any], version: int) -> None:
    engine.worker.begin(version)
    engine.worker.load_weights(list(weights.items()))
    engine.worker.finish(version)
    engine.worker.publish(version)


def storage_bytes(engine: ReferenceEngine) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in engine.worker.synced_tensors())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_released_weights_are_freed_and_their_shapes_stay(engine: ReferenceEngine) -> None:
    import torch

    big = torch.nn.Parameter(torch.ones(16 << 20))
    engine.model.lm_head.weight = torch.nn.Parameter(big.detach().view(512, -1))
    del big
    described = engine.worker.describe()
    before = resident_bytes()
    engine.sleep(("weights",))
    assert storage_bytes(engine) == 0
    assert before - resident_bytes() > 48 << 20
    asleep = engine.worker.describe()
    assert (asleep.expected, asleep.live) == (described.expected, described.live)
    engine.wake(("weights",))
    assert storage_bytes(engine) > 64 << 20


@pytest.mark.requirement("R78")
def test_asleep_it_refuses_to_generate_and_says_what_it_released(engine: ReferenceEngine) -> None:
    for tags in (("weights",), ("kv_cache",), ("weights", "kv_cache")):
        engine.sleep(tags)
        with pytest.raises(NotServableError, match=f"has released {', '.join(tags)}"):
            engine.generate(PROBE)
        engine.wake(tags)


def test_only_the_cache_released_serves_again_once_it_is_awake(engine: ReferenceEngine) -> None:
    before = engine.generate(PROBE)
    engine.sleep(("kv_cache",))
    engine.wake(("kv_cache",))
    assert engine.generate(PROBE) == before


def test_awake_without_a_sync_released_weights_are_not_servable(
    engine: ReferenceEngine, other_untied: dict[str, Any]
) -> None:
    import torch

    engine.sleep()
    engine.wake()
    with pytest.raises(NotServableError, match="no full sync has written them since"):
        engine.generate(PROBE)
    assert all(bool(tensor.isnan().all()) for tensor in engine.worker.synced_tensors())
    sync(engine, other_untied, 4)
    assert engine.generate(PROBE).generations[0].weight_version == 4
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, other_untied[name]), name


def test_a_tied_model_sleeps_and_wakes_too(tied_folder: str, other_tied: dict[str, Any]) -> None:
    import torch

    engine = ReferenceEngine(tied_folder)
    engine.sleep()
    engine.wake()
    sync(engine, {name: value for name, value in other_tied.items() if name != "lm_head.weight"}, 1)
    assert torch.equal(engine.model.lm_head.weight, other_tied["lm_head.weight"])
    assert engine.generate(PROBE).generations[0].weight_version == 1


def test_an_incomplete_sync_does_not_make_lost_weights_servable(
    engine: ReferenceEngine, other_untied: dict[str, Any]
) -> None:
    engine.sleep(("weights",))
    engine.wake(("weights",))
    engine.worker.begin(1)
    engine.worker.load_weights([("model.norm.weight", other_untied["model.norm.weight"])])
    with pytest.raises(SyncError, match="incomplete"):
        engine.worker.finish(1)
    assert engine.worker.why_not_whole()


@pytest.mark.parametrize(
    ("released", "call", "tags", "why"),
    [
        ((), "wake", ("weights",), "weights cannot be resumed: it is not released"),
        (("kv_cache",), "wake", ("weights", "kv_cache"), "weights cannot be resumed"),
        (("weights",), "sleep", ("weights",), "weights cannot be released: it is released already"),
        ((), "sleep", ("kv-cache",), "no memory of tag 'kv-cache'"),
    ],
)
def test_what_is_not_symmetric_is_refused_and_changes_nothing(
    engine: ReferenceEngine, released: tuple[str, ...], call: str, tags: tuple[str, ...], why: str
) -> None:
    if released:
        engine.sleep(released)
    with pytest.raises(EngineError, match=why):
        getattr(engine, call)(tags)
    assert engine.memory.released == released


def test_a_sync_into_released_weights_is_refused_before_it_writes(engine: ReferenceEngine) -> None:
    engine.sleep(("weights",))
    with pytest.raises(SyncError, match="its weights are released"):
        engine.worker.begin(1)
    assert engine.servable
