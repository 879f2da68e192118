"""One of two replicas is killed and started again at its address: the next sync brings it level, alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from weightlane.front.client import FrontEndpoint
from weightlane.testing.greedy import Continuation, forced_logprobs
from weightlane.testing.steps import steps_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from conftest import EngineProcess, Nursery

    from weightlane.testing.ranks import RankGroup, RankOutcome

PROMPTS = [[1, 2, 3], [7, 5]]


@pytest.fixture(scope="module")
def other_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with a wider feed-forward layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("other-model")
    config = LlamaConfig.from_pretrained(model_folder)
    config.intermediate_size += 32
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logprob_gap(model_folder: Path) -> Callable[[EngineProcess, Path], tuple[float, list[int | None]]]:
    """The largest difference between engine and trainer on the engine's tokens, and the stamped versions."""
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(model_folder).eval()

    def measure(engine: EngineProcess, weights: Path) -> tuple[float, list[int | None]]:
        model.load_state_dict(load_file(weights))
        rollout = FrontEndpoint(engine.address, 30.0).generate(PROMPTS, max_tokens=4)
        said = [Continuation(item.token_ids, item.logprobs) for item in rollout]
        gaps = [
            abs(a - b)
            for mine, theirs in zip(forced_logprobs(model, PROMPTS, said), said, strict=True)
            for a, b in zip(mine.tolist(), theirs.logprobs, strict=True)
        ]
        return max(gaps), [item.weight_version for item in rollout]

    return measure


class Run:
    """Drives scenario `rejoin` of the ranks while it kills and starts replica 1."""

    def __init__(self, group: RankGroup, go: Path) -> None:
        self.group = group
        self.go = go

    def halted(self, word: str) -> None:
        self.group.wait_for_output(0, f"{word}\n", 60)

    def on(self, word: str) -> None:
        (self.go / word).touch()


@pytest.fixture(scope="module")
def course(
    ranks: Callable[..., RankGroup],
    nursery: Nursery,
    model_folder: Path,
    other_model: Path,
    logprob_gap: Callable[[EngineProcess, Path], tuple[float, list[int | None]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[RankOutcome], Mapping[str, tuple[float, list[int | None]]]]:
    go = tmp_path_factory.mktemp("go")
    first, second = nursery.start(model_folder), nursery.start(model_folder)
    gaps: dict[str, tuple[float, list[int | None]]] = {}
    with ranks("rejoin", 2, [first.address, second.address], go=str(go)) as group:
        run = Run(group, go)
        run.halted("BOTH")
        second.kill()
        run.on("BOTH")
        run.halted("DEAD")
        second = nursery.start(other_model, second.address)
        run.on("DEAD")
        run.halted("REFUSED")
        second.kill()
        second = nursery.start(model_folder, second.address)
        run.on("REFUSED")
        run.halted("BACK")
        for name, engine in (("first, back", first), ("second, back", second)):
            gaps[name] = logprob_gap(engine, go / "back.safetensors")
        run.on("BACK")
        group.wait_for_output(0, "MOVED A BUCKET", 60)
        second.kill()
        run.halted("KILLED")
        second = nursery.start(model_folder, second.address)
        run.on("KILLED")
        outcomes = group.wait(90)
    for name, engine in (("first, at the end", first), ("second, at the end", second)):
        gaps[name] = logprob_gap(engine, go / "back again.safetensors")
    gaps["second, against older weights"] = logprob_gap(second, go / "back.safetensors")
    first.kill()
    second.kill()
    for outcome in outcomes:
        assert outcome.status == 0, outcome.output
    return outcomes, gaps


def facts(outcomes: list[RankOutcome], name: str) -> list[dict[str, Any]]:
    return [step.facts for step in steps_named(outcomes, name)]


def test_while_it_is_dead_a_sync_fails_by_name_and_the_other_serves_what_it_had(course: Any) -> None:
    outcomes, _ = course
    for step in steps_named(outcomes, "while it is dead"):
        assert step.type == "EngineDeadError"
        assert "Replica 1 of lane" in step.text
        assert "touched no receiver" in step.text
        assert step.seconds < 30
    assert facts(outcomes, "served meanwhile")[0]["versions"] == [1]
    controller, other = facts(outcomes, "state while it is dead")
    for state in (controller, other):
        assert (state["phase"], state["published"], state["held"]) == (["failed"], [1], [1, 1])
    assert controller["errors"][0] == ""
    assert "EngineDeadError" in controller["errors"][1]


def test_an_engine_that_came_back_with_another_model_is_refused_on_every_rank(course: Any) -> None:
    outcomes, _ = course
    for step in steps_named(outcomes, "another model"):
        assert step.type == "PlanError"
        assert "was started anew since the plan was made" in step.text
        assert "[shape] model.layers.0.mlp.down_proj.weight" in step.text


def test_the_next_sync_takes_it_back_alone_with_a_ring_of_the_rank_that_feeds_it(course: Any) -> None:
    outcomes, gaps = course
    assert [step.outcome for step in steps_named(outcomes, "back")] == ["ok", "ok"]
    (told,) = facts(outcomes, "rejoined")
    assert told["replicas"] == [1]
    assert told["peers"] == [1]
    assert facts(outcomes, "first kept")[0]["same"] == [1]
    for engine in ("first, back", "second, back"):
        gap, versions = gaps[engine]
        assert gap < 1e-4
        assert versions == [4, 4]


def test_killed_in_the_middle_of_a_sync_it_also_comes_back_level(course: Any) -> None:
    outcomes, gaps = course
    for step in steps_named(outcomes, "killed in the middle"):
        assert step.outcome == "error"
        assert "not published" in step.text
    for state in facts(outcomes, "state after the kill"):
        assert (state["phase"], state["published"], state["servable"]) == (["failed"], [4], [None, None])
    assert [step.outcome for step in steps_named(outcomes, "back again")] == ["ok", "ok"]
    for engine in ("first, at the end", "second, at the end"):
        gap, versions = gaps[engine]
        assert gap < 1e-4
        assert versions == [6, 6]
    for state in facts(outcomes, "state at the end"):
        assert (state["phase"], state["held"], state["servable"]) == (["published"], [6, 6], [1, 1])


def test_the_gap_above_sees_weights_of_another_version(course: Any) -> None:
    _, gaps = course
    assert gaps["second, against older weights"][0] > 1e-2
