"""Transport `disk` through a whole lane: real engines, real ranks, and the folder that is left behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.errors import PlanError, SyncError
from weightlane.testing.ranks import RankGroup, RankOutcome
from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from conftest import EngineProcess

PROGRAM = Path(__file__).with_name("disk_program.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "versions"


@pytest.fixture(scope="module")
def ran(engine: EngineProcess, model_folder: Path, folder: Path) -> list[RankOutcome]:
    environment = {
        "LANE_TEST_MODEL": str(model_folder),
        "LANE_TEST_URL": engine.address,
        "LANE_TEST_FOLDER": str(folder),
    }
    with RankGroup([str(PROGRAM)], 2, environment) as group:
        outcomes = group.wait(100.0)
    for outcome in outcomes:
        assert outcome.status == 0, outcome.output
    return outcomes


@pytest.mark.requirement("R67", part="full weights")
def test_every_transport_carries_one_manifest_and_one_digest(ran: list[RankOutcome]) -> None:
    for placement in ("replicated", "partitioned"):
        told = [
            steps_named(ran, f"{placement} over {transport}")[0].facts
            for transport in ("shm", "inline", "disk")
        ]
        assert len({str(facts["digest"]) for facts in told}) == 1
        assert len({str(facts["manifest"]) for facts in told}) == 1
        (verified,) = {str(facts["verified"]) for facts in told}
        assert (
            "counts equal on 1 worker, digests equal on 1, 127,296 elements read back equal on 1" in verified
        )


def test_the_plan_says_where_it_writes(ran: list[RankOutcome]) -> None:
    (step,) = steps_named(ran, "replicated over disk")
    lines = [str(line) for line in step.facts["plan"]]
    assert "transport disk: rank 0 -> worker 0" in lines
    assert any(line.startswith("coverage proven: 21 tensors of 1 worker, ") for line in lines)
    assert "folder: a new private temporary folder of rank 0, removed at close" in step.facts["plan"]


def test_a_disk_that_is_too_small_is_one_error_on_all_ranks_and_touches_no_engine(
    ran: list[RankOutcome],
) -> None:
    texts = [step.text for step in steps_named(ran, "too small")]
    assert len(texts) == 2
    for text in texts:
        assert "model-00001-of-" in text
        assert "could not be written" in text
        assert "File too large" in text
        assert "lm_head.weight" in text
        assert "not published" in text
    (before,) = steps_named(ran, "after the first")
    (after,) = steps_named(ran, "after too small")
    assert before.facts == after.facts == {"folders": ["sync-1-version-20"]}
    (served,) = steps_named(ran, "generate after too small: version")
    assert served.facts["versions"] == [20]


def test_a_file_altered_behind_the_trainers_back_is_found_and_fences_the_engine(
    ran: list[RankOutcome],
) -> None:
    for step in steps_named(ran, "altered"):
        assert step.type == "VerificationError"
        assert "model-00002-of-" in step.text
        assert "has digest" in step.text
    (left,) = steps_named(ran, "after altered")
    assert left.facts["folders"] == ["sync-1-version-20"]
    (refused,) = steps_named(ran, "generate after altered")
    assert refused.type == "NotServableError"


def test_the_next_sync_heals_and_close_keeps_the_published_version_alone(ran: list[RankOutcome]) -> None:
    assert [step.outcome for step in steps_named(ran, "healed")] == ["ok", "ok"]
    (served,) = steps_named(ran, "generate after healed: version")
    assert served.facts["versions"] == [23]
    (left,) = steps_named(ran, "after close")
    assert left.facts["folders"] == ["sync-4-version-23"]


def test_a_folder_that_cannot_be_made_or_differs_is_told_on_all_ranks(ran: list[RankOutcome]) -> None:
    for step in steps_named(ran, "bad folder"):
        assert step.type == "SyncError"
        assert "No such file or directory" in step.text
    for step in steps_named(ran, "folders differ"):
        assert step.type == "PlanError"
        assert "[rank-disagreement] folder" in step.text


def test_the_folder_beside_a_config_is_a_checkpoint(
    ran: list[RankOutcome], folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (version,) = folder.glob("weightlane-*/sync-4-version-23")
    copy = tmp_path / "checkpoint"
    shutil.copytree(version, copy)
    shutil.copy(model_folder / "config.json", copy)
    loaded = AutoModelForCausalLM.from_pretrained(copy).state_dict()
    for name, tensor in load_file(model_folder / "model.safetensors").items():
        assert torch.equal(loaded[name], tensor + 0.01), name


def test_one_rank_feeds_an_engine_of_its_own_process(model_folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    import weightlane as wl
    from weightlane.reference.engine import ReferenceEngine

    engine = ReferenceEngine(str(model_folder))
    weights = load_file(model_folder / "model.safetensors")
    for tensor in weights.values():
        tensor.mul_(1.5)
    with wl.connect(
        trainer=wl.trainer("torch", model=weights),
        rollout=[wl.rollout("reference", engine=engine)],
        transport="disk",
        folder=str(tmp_path / "versions"),
        bucket_bytes=64 << 10,
    ) as lane:
        report = lane.sync(version=4)
        assert report.replicas[0].verified.startswith("counts equal on 1 worker, digests equal on 1, ")
        assert lane.replicas[0].generate([[1, 2]], max_tokens=1)[0].weight_version == 4
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("transport", [None, "shm"])
def test_a_folder_without_the_transport_is_a_problem_and_no_silent_choice(
    model_folder: Path, engine: EngineProcess, transport: str | None, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    import weightlane as wl

    with pytest.raises(PlanError) as caught:
        wl.connect(
            trainer=wl.trainer("torch", model=load_file(model_folder / "model.safetensors")),
            rollout=[wl.rollout("reference", url=engine.address)],
            transport=transport,  # type: ignore[arg-type]
            folder=str(tmp_path),
        )
    assert not isinstance(caught.value, SyncError)
    assert [(item.kind, item.subject) for item in caught.value.problems] == [("transport", "folder")]
    assert list(tmp_path.iterdir()) == []
