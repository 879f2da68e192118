"""Engines that draft: what a sync writes of a drafter, what it leaves, and that none of it is forgotten."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane_vllm.drafter import DRAFTER
from weightlane_vllm.launch import FrontStart, front_environment
from weightlane_vllm.patches import CPU_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROGRAMS = Path(__file__).parent / "programs"
ERAS = ["0.32", "0.27.1"]
EXACT, WRONG = 1e-5, 1e-2


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """What a program saw of this era, by what was done; of engines, one after the other in one process."""

    @cache
    def run(era: str, *kinds: str, program: str = "sync_drafters", **variables: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("drafters")
        environment = {
            **os.environ,
            **front_environment(FrontStart("", "", "cpu")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **variables,
        }
        if era == "0.27.1":
            before = str(request.getfixturevalue("vllm_older"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH"))))
        words = [
            str(vllm_python),
            str(PROGRAMS / f"{program}.py"),
            str(folder),
            str(folder / "answer"),
            *kinds,
        ]
        finished = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
        answer: dict[str, Any] = json.loads((folder / "answer").read_text())
        return answer

    return run


def arrived(seen: dict[str, Any]) -> None:
    assert seen["coverage"] == "proven"
    for sync in seen["syncs"]:
        assert sync["distance"] <= 1e-4
        assert sync["moved"] >= 1e-2


def follows(seen: dict[str, Any]) -> None:
    """The drafter of the model's own checkpoint is trained and sent with it."""
    arrived(seen)
    assert seen["drafter"] == "MiMoMTP"
    assert seen["by_attribute"], "older runners have no other way to it"
    assert seen["looks"] == [True, True], "else it drafts with old weights"
    assert seen["all_moved"]
    (note,) = seen["notes"]
    assert "the mtp drafter is loaded from the model's own checkpoint" in note
    assert "draft.model.mtp_layers.2.input_proj.weight: 8192 of its 8192 elements" in seen["left_out"]
    assert "WEIGHTLANE_VLLM_DRAFTER=keep" in seen["left_out"]
    assert "draft.model.embed_tokens" not in seen["left_out"], "the model's own"
    if not seen["packed"]:
        assert "draft.model.mtp_layers.2.router_bias: 4 of its 4 elements" in seen["buffer_left_out"]
    assert "(MiMoMTP) refused model.mtp_layers.0.input_proj.weight" in seen["wrong_shape"]
    assert "unheard_of" in seen["unknown"]
    assert "is out of reach here: it would go on with old weights" in seen["transfer"]
    assert "does not support draft model weight updates" in seen["draft_update"]


def stays(seen: dict[str, Any], method: str) -> None:
    """One that is not loaded from the model's own checkpoint, or is to be kept."""
    arrived(seen)
    assert seen["looks"] == [True, True], "bitwise as it was loaded"
    (note,) = seen["notes"]
    assert f"the {method} drafter keeps its own weights" in note
    assert seen["owned"] > 0


def test_the_drafter_of_the_models_own_checkpoint_is_written(engines: Callable[..., dict[str, Any]]) -> None:
    follows(engines("0.32", "mtp")["mtp"])


@pytest.mark.long_run
def test_a_drafter_of_a_checkpoint_of_its_own_is_kept_until_it_is_sent(
    engines: Callable[..., dict[str, Any]],
) -> None:
    seen = engines("0.32", "own")
    stays(seen["own"], "draft_model")
    assert "draft.lm_head.weight: 32768 of its 32768 elements" in seen["own"]["in_part"]
    arrived(seen["own"]["trained"])
    assert seen["own"]["trained"]["looks"] == [True, True]


@pytest.mark.long_run
@pytest.mark.parametrize("era", ERAS)
def test_with_lora_on_as_well(engines: Callable[..., dict[str, Any]], era: str) -> None:
    seen = engines(era, "mtp+lora", "own+lora", "itself+lora", "adapters")
    follows(seen["mtp+lora"])
    stays(seen["own+lora"], "draft_model")
    drafts_are_accepted(seen["itself+lora"])
    first, second = seen["adapters"]["syncs"]
    assert (first["phases"], second["phases"]) == (["base", "adapter"], ["adapter"])
    for sync in (first, second):
        assert sync["moved"]
        assert max(sync["distance"], sync["through_us"]) <= 1e-4
    assert seen["adapters"]["in_step"]


@pytest.mark.long_run
def test_by_the_older_engine(engines: Callable[..., dict[str, Any]]) -> None:
    seen = engines("0.27.1", "mtp", "own", "eagle3", "ngram")
    follows(seen["mtp"])
    stays(seen["own"], "draft_model")
    arrived(seen["ngram"])
    eagle3_keeps_its_own(seen["eagle3"])


def drafts_are_accepted(seen: dict[str, Any]) -> None:
    arrived(seen)
    assert seen["looks"] == [True, True]
    for sync in seen["syncs"]:
        drafted, accepted = sync["accepted"]
        assert drafted == accepted > 0, "a drafter with old weights is not believed"


def eagle3_keeps_its_own(seen: dict[str, Any]) -> None:
    stays({**seen, "looks": [kept for kept, _ in seen["looks"]]}, "eagle3")
    assert [follow for _, follow in seen["looks"]] == [True, True], "embeddings are the model's"


@pytest.mark.long_run
def test_one_that_looks_drafts_up_and_one_that_shares_embeddings(
    engines: Callable[..., dict[str, Any]],
) -> None:
    seen = engines("0.32", "eagle3", "itself", "ngram")
    arrived(seen["ngram"])
    assert (seen["ngram"]["looks"], seen["ngram"]["notes"]) == ([True, True], [])
    eagle3_keeps_its_own(seen["eagle3"])
    drafts_are_accepted(seen["itself"])


@pytest.mark.long_run
def test_its_owner_may_have_it_kept(engines: Callable[..., dict[str, Any]]) -> None:
    seen = engines("0.32", "kept", "itself", **{DRAFTER: "keep"})
    stays(seen["kept"], "mtp")
    assert "has no tensor of this name" in seen["kept"]["exported"]
    arrived(seen["itself"])
    assert seen["itself"]["looks"] == [False, False]
    for sync in seen["itself"]["syncs"]:
        drafted, accepted = sync["accepted"]
        assert accepted < drafted, "the control: what becomes of acceptance where it is not written"


@pytest.mark.long_run
def test_packed_weights_of_both_are_loaded_in_one_session(
    engines: Callable[..., dict[str, Any]],
) -> None:
    seen = engines("0.32", "mtp", "own", "itself", **{CPU_WEIGHTS: "packed"})
    assert seen["mtp"]["packed"] > 0, "else nothing is shown"
    follows(seen["mtp"])
    stays(seen["own"], "draft_model")
    drafts_are_accepted(seen["itself"])


@pytest.mark.long_run
@pytest.mark.parametrize("era", ERAS)
def test_the_layers_of_a_drafter_compute_with_what_was_sent(
    engines: Callable[..., dict[str, Any]], era: str
) -> None:
    """In real layers without an engine, found by the attribute that runners before 0.26 have."""
    seen = engines(era, program="drafters_in_workers")
    for kind, path in (("packed", "layerwise-reload"), ("lora", "in-place")):
        of = seen[kind]
        assert (of["path"], of["problems"]) == (path, [])
        assert (of["emptied"] > 0) == (kind == "packed")
        assert len(of["left_out"]) == 11
        assert all(told.startswith("uncovered draft.model.mtp_layers.2.") for told in of["left_out"])
        assert min(of["stale"].values()) >= WRONG, "else nothing is shown"
        assert not of["old"]
        assert max(*of["synced"].values(), *of["again"].values()) <= EXACT
        assert of["holds"]
        assert of["holds_again"]


@pytest.mark.long_run
@pytest.mark.parametrize("era", ERAS)
def test_a_packed_drafter_that_is_kept_is_never_put_in_its_loading_form(
    engines: Callable[..., dict[str, Any]], era: str
) -> None:
    kept = engines(era, program="drafters_in_workers")["kept"]
    assert kept["problems"] == []
    assert kept["computes"] == [True] * 3
    assert kept["holds"]
    assert kept["follows"], "embeddings are the model's"


@pytest.mark.long_run
@pytest.mark.parametrize("era", ERAS)
def test_two_ranks_cover_model_and_drafter_together(engines: Callable[..., dict[str, Any]], era: str) -> None:
    ranks = engines(era, program="drafters_in_workers")["ranks"]
    assert ranks["problems"] == []
    assert ranks["input_proj"] == [[64, 128], [64, 128]], "replicated"
    assert ranks["qkv_proj"] == [[96, 64], [96, 64]], "one head of two each, and the one of keys and values"
