"""Failures that users reported of other stacks, copied as data: which phases each sync must have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from adapter_models import apart, engine_says, make_base, moved, wrapped

import weightlane as wl
from weightlane.errors import PlanError
from weightlane.reference.engine import ReferenceEngine
from weightlane.testing.ranks import _free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane


class Report(NamedTuple):
    """One report: its source, the seed of the engine's base (0: the trainer's), the phases of each sync."""

    source: str
    base_of_engine: int
    phases: list[list[str]]


ADAPTER_ALONE = Report(  # sp-02: only the frozen base travelled, each time, and the adapter never
    "verl-project/verl#7495", 0, [["adapter"], ["adapter"], ["adapter"]]
)
DUMMY_ENGINE = Report(  # lc-05: the first adapter met an engine that had no base yet
    "verl-project/verl#5769", 3, [["base", "adapter"], ["adapter"]]
)


@pytest.mark.parametrize("report", [ADAPTER_ALONE, DUMMY_ENGINE], ids=lambda item: item.source)
def test_each_sync_has_the_phases_that_the_report_asks_for(
    model_folder: str, tmp_path: Any, open_lane: Callable[..., Lane], report: Report
) -> None:
    folder = model_folder
    if report.base_of_engine:
        folder = str(tmp_path)
        make_base(seed=report.base_of_engine).save_pretrained(folder)
    model = wrapped(model_folder)
    lane = open_lane(model, ReferenceEngine(folder))
    digests = set()
    for version, phases in enumerate(report.phases, 1):
        assert moved(model, seed=version) >= 1e-2
        synced = lane.sync(version)
        digests.add(synced.digest)
        assert [phase.phase.value for phase in synced.phases] == phases
        assert all(".lora_" in tensor.name for tensor in lane.plan().tensors)
        assert synced.unchanged_since is None
        assert apart(model, engine_says(lane)) <= 1e-4
    assert lane.sync(9).digest in digests | {""}


def test_a_base_that_was_shifted_in_training_never_goes_unsaid(
    model_folder: str, open_lane: Callable[..., Lane]
) -> None:
    """sp-05 (ISEEKYAN/Megatron-LM#75): the adapter alone, over the checkpoint's own base, is wrong."""
    engine = ReferenceEngine(model_folder)
    with pytest.raises(PlanError, match=r"init_lora_weights: it is 'pissa'.*Mode merged could carry it"):
        open_lane(wrapped(model_folder, init_lora_weights="pissa"), engine)
    model = wrapped(model_folder)
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.mul_(0.5)
    lane = open_lane(model, engine)
    assert [phase.phase.value for phase in lane.sync(1).phases] == ["base", "adapter"]
    assert apart(model, engine_says(lane)) <= 1e-4


def test_a_payload_that_did_not_change_is_told(
    policy: Any, open_lane: Callable[..., Lane], engine: Any
) -> None:
    """sp-02's alarm, where bytes are digested: the same adapter twice is told with the version it was."""
    lane = open_lane(policy, engine, transport="shm")
    assert lane.sync(1).unchanged_since is None
    assert lane.sync(2).unchanged_since == 1


def test_fused_names_of_an_engine_are_refused_before_anything_is_sent(engine: ReferenceEngine) -> None:
    """sp-10 (PrimeIntellect-ai/prime-rl#3577): the wire carries checkpoint names and full shapes."""
    tensors = dict(engine.model.state_dict())
    q, k, v = (tensors.pop(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv")
    tensors["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat([q, k, v])
    with pytest.raises(PlanError, match=r"extra-name\] model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        wl.connect(
            trainer=wl.trainer("torch", model=tensors),
            rollout=[wl.rollout("reference", engine=engine)],
            control=f"tcp://127.0.0.1:{_free_port()}",
        )
