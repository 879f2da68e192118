"""Mode adapter to vLLM at tensor parallel 2: whoever names the adapter is answered as by the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError, SyncError
from weightlane.front.client import FrontEndpoint
from weightlane.transports.shm import ShmSink

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))
TOKENS = 12
AGREES = 1e-4
MOVED = 1e-2
MODULES = 14


def open_lane(trainer: Any, front: FrontProcess, **options: Any) -> Any:
    return wl.connect(
        trainer=wl.trainer("torch", model=trainer.model, adapter=options.pop("adapter", None)),
        rollout=[wl.rollout("vllm", url=front.address)],
        mode="adapter",
        bucket_bytes=8 << 10,  # many buckets
        **options,
    )


@pytest.mark.requirement("R55")
@pytest.mark.parametrize(
    ("swap", "transport"),
    [("two_slot", "shm"), pytest.param("paused", "inline", marks=pytest.mark.long_run)],
)
def test_three_syncs_each_move_and_match_the_trainer(
    lora_front: FrontProcess, tiny_folder: Path, adapter_trainer_of: type, swap: str, transport: str
) -> None:
    trainer = adapter_trainer_of(tiny_folder)
    long = (tuple(range(3, 203)),)  # more than one block of the prefix cache
    with open_lane(trainer, lora_front, swap=swap, transport=transport) as lane:
        endpoint = lane.replicas[0]
        before: AdapterRef | None = None
        for version in (1, 2, 3):
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            if before is not None:
                old = endpoint.generate(PROMPTS, max_tokens=TOKENS, adapter=before)
                assert truth.distance(old) >= MOVED, "stale would pass"
            report = lane.sync(version=version)
            assert f"adapter bound to {MODULES} modules on 2" in str(report.replicas[0].verified)
            ref = lane.adapter_ref()
            assert ref == AdapterRef(f"default@{version}" if swap == "two_slot" else "default", version)
            generations = endpoint.generate(PROMPTS, max_tokens=TOKENS, adapter=ref)
            assert truth.distance(generations) <= AGREES
            assert {generation.weight_version for generation in generations} == {version}
            assert (
                trainer.truth(long, 4).distance(endpoint.generate(long, max_tokens=4, adapter=ref)) <= AGREES
            )
            if swap == "two_slot" and before is not None:
                with pytest.raises(EngineError, match=f"serves no adapter '{before.name}'"):
                    endpoint.generate(PROMPTS, max_tokens=1, adapter=before)
            before = ref
        with pytest.raises(EngineError, match="names no adapter"):
            endpoint.generate(PROMPTS, max_tokens=1)


@pytest.mark.requirement("R68")
def test_a_sync_that_fails_half_way_leaves_the_old_adapter_serving(
    lora_front: FrontProcess, tiny_folder: Path, adapter_trainer_of: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = adapter_trainer_of(tiny_folder)
    with open_lane(trainer, lora_front, transport="shm") as lane:
        lane.sync(version=1)
        ref, truth = lane.adapter_ref(), trainer.truth(PROMPTS, TOKENS)
        whole = ShmSink.put

        def put(self: Any, layout: Any, tensors: Any) -> None:
            if layout.index == 2:
                raise OSError("the cable is out")
            whole(self, layout, tensors)

        monkeypatch.setattr(ShmSink, "put", put)
        assert trainer.change(seed=5) >= MOVED
        with pytest.raises(SyncError, match="the cable is out"):
            lane.sync(version=2)
        assert lane.adapter_ref() == ref
        assert truth.distance(lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS, adapter=ref)) <= AGREES
        monkeypatch.undo()
        lane.sync(version=3)
        said = lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS, adapter=lane.adapter_ref())
        assert trainer.truth(PROMPTS, TOKENS).distance(said) <= AGREES


def test_two_adapters_are_answered_each_with_its_own(
    lora_front: FrontProcess, tiny_folder: Path, adapter_trainer_of: type
) -> None:
    left = adapter_trainer_of(tiny_folder, name="left")
    right = adapter_trainer_of(tiny_folder, name="right", target_modules=["q_proj", "down_proj"])
    assert left.change(seed=1) >= MOVED
    assert right.change(seed=2) >= MOVED
    endpoint = FrontEndpoint(lora_front.address, 120.0)
    with (
        open_lane(left, lora_front, adapter="left") as lane,
        open_lane(right, lora_front, adapter="right") as other,
    ):
        lane.sync(version=1)
        other.sync(version=7)
        lane.sync(version=2)
        for trainer, open_ in ((left, lane), (right, other)):
            said = endpoint.generate(PROMPTS, max_tokens=TOKENS, adapter=open_.adapter_ref())
            assert trainer.truth(PROMPTS, TOKENS).distance(said) <= AGREES
            assert {item.weight_version for item in said} == {open_.adapter_ref().version}


def test_another_base_is_sent_before_the_adapter_and_then_never_again(
    lora_front: FrontProcess, tiny_folder: Path, trainer_of: type, adapter_trainer_of: type
) -> None:
    other = trainer_of(tiny_folder)
    assert other.change(seed=11) >= MOVED
    with wl.connect(
        trainer=wl.trainer("torch", model=other.model), rollout=[wl.rollout("vllm", url=lora_front.address)]
    ) as lane:
        lane.sync(version=1)  # the engine now holds a base that the adapter was not trained on
    trainer = adapter_trainer_of(tiny_folder)
    with open_lane(trainer, lora_front) as lane:
        reports = [lane.sync(version=version) for version in (1, 2)]
        assert [[item.phase.value for item in report.phases] for report in reports] == [
            ["base", "adapter"],
            ["adapter"],
        ]
        said = lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS, adapter=lane.adapter_ref())
        assert trainer.truth(PROMPTS, TOKENS).distance(said) <= AGREES
