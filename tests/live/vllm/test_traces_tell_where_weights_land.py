"""Placement tables of live engines, of two versions, and of models that are only built."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane_vllm.launch import FrontStart, front_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

PROGRAMS = Path(__file__).parent / "programs"
VERSIONS = ("0.32.0", "0.27.1")
EACH = [VERSIONS[0], pytest.param(VERSIONS[1], marks=pytest.mark.long_run)]
"""In every run an `LLM` of one's own has its coverage proven by a trace of the older one."""
LIVE = ("dense", "dense+lora", "tied", "tied+lora", "experts", "experts+lora", "dense+packed")
DOES_NOT_START = {("0.27.1", "experts+lora"): "Monolithic kernels are not supported for Fused MoE LoRA"}
STYLES = {
    ("0.27.1", "dense+lora"): "base-layer",
    ("0.27.1", "tied+lora"): "base-layer",
    ("0.32.0", "experts+lora"): "mixed",
}
REFUSED = {  # by the operator whose value is written: each holds `-exp(A_log)`
    "MambaForCausalLM": "aten.exp",
    "Mamba2ForCausalLM": "aten.copy_",  # made in place, from what was loaded before
    "JambaForCausalLM": "aten.exp",
}
NOT_BUILT = {"BloomForCausalLM": "Cannot copy out of meta tensor"}


class Programs:
    """Runs the programs of this folder in the engine's environment; a version's answers are made once."""

    def __init__(self, python: Path, older: Path, folder: Path) -> None:
        self._python, self._older, self._folder = python, older, folder
        self._answers: dict[object, Any] = {}

    def answer(self, program: str, version: str, *arguments: str, **variables: str) -> Any:
        """What `program` wrote, run on this version of vLLM."""
        asked = (program, version, arguments, tuple(sorted(variables.items())))
        if asked not in self._answers:
            self._answers[asked] = self._run(program, version, arguments, variables)
        return self._answers[asked]

    def _run(
        self, program: str, version: str, arguments: tuple[str, ...], variables: Mapping[str, str]
    ) -> Any:
        checkpoints, answer = self._folder / "checkpoints", self._folder / f"{program}-{version}.json"
        checkpoints.mkdir(exist_ok=True)
        path = [str(PROGRAMS), os.environ.get("PYTHONPATH", "")]
        if version != VERSIONS[0]:
            path.insert(0, str(self._older))
        environment = {
            **os.environ,
            **front_environment(FrontStart("", "", "cpu")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            **variables,
        }
        finished = subprocess.run(
            [str(self._python), str(PROGRAMS / f"{program}.py"), str(checkpoints), str(answer), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
        return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def programs(vllm_python: Path, vllm_older: Path, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(vllm_python, vllm_older, tmp_path_factory.mktemp("traces"))


def traced(programs: Programs, version: str) -> dict[str, Any]:
    """What one run saw of a version: live engines and, of the newest, models only built beside them."""
    sweep = ("sweep",) if version == VERSIONS[0] else ()
    answer: dict[str, Any] = programs.answer("trace_live_models", version, *sweep)
    return answer


def live(programs: Programs, version: str) -> dict[str, dict[str, Any]]:
    """What was seen of each live engine, those that do not start left out."""
    seen = {item["name"]: item for item in traced(programs, version)["live"]}
    assert tuple(seen) == LIVE
    for name, item in seen.items():
        reason = DOES_NOT_START.get((version, name), "")
        assert item["started"] is not bool(reason), (name, item["reason"])
        assert reason in item["reason"]
    started = {name: item for name, item in seen.items() if item["started"]}
    assert {item["version"] for item in started.values()} == {version}
    return started


@pytest.mark.parametrize("version", EACH)
def test_every_element_is_known_as_the_oracle_knows_it(programs: Programs, version: str) -> None:
    for name, seen in live(programs, version).items():
        assert seen["problems"] == [], name
        assert seen["differences"] == [], name
        assert seen["style"] == STYLES.get((version, name), "plain"), name
        assert (seen["checkpoint_forms"] > 0) == (name == "dense+packed"), name


@pytest.mark.parametrize("version", EACH)
def test_the_live_model_and_its_outputs_stay(programs: Programs, version: str) -> None:
    seen = live(programs, version)
    assert seen["dense+lora"]["facts"]["traces"] == 100
    for name, item in seen.items():
        assert item["changed"] == [], name
        assert item["facts"]["same_under_inference_mode"], name
        assert item["facts"].get("outputs_stay", name == "experts+lora"), name


@pytest.mark.requirement("R44")
@pytest.mark.requirement("R45")
@pytest.mark.parametrize("version", EACH)
def test_static_rules_and_the_trace_give_one_map(programs: Programs, version: str) -> None:
    for name, seen in live(programs, version).items():
        assert seen["maps_differ"] == [], name
        assert bool(seen["renamed"]) == (seen["style"] != "plain"), name


def test_plain_names_are_seen_to_lose_every_expert(programs: Programs) -> None:
    seen = live(programs, "0.32.0")["experts+lora"]
    lost = seen["facts"]["plain_names_lose"]
    assert len(lost) == 2 * 4 * 3  # layers, experts, projections
    assert all(".experts." in name for name in lost)
    assert sorted(name.replace(".base_layer.", ".") for name in seen["renamed"]) == sorted(lost)


def test_architectures_are_complete_or_refused_by_operator(programs: Programs) -> None:
    built = traced(programs, "0.32.0")["built"]
    assert len(built) == 20
    for seen in built:
        name = seen["name"]
        assert seen["started"] is (name not in NOT_BUILT), (name, seen["reason"])
        assert NOT_BUILT.get(name, "") in seen["reason"]
        assert seen["differences"] == [], name
        if name in REFUSED:
            assert any(REFUSED[name] in problem for problem in seen["problems"]), name
        else:
            assert seen["problems"] == [], name


def test_the_shared_rotary_embeddings_stay_real_only_because_they_are_kept_apart(programs: Programs) -> None:
    with_care, without = traced(programs, "0.32.0")["ropes"]
    assert with_care == 0
    assert without > 0


@pytest.mark.parametrize("version", EACH)
def test_an_engine_made_after_models_on_meta_generates_as_before(programs: Programs, version: str) -> None:
    seen = live(programs, version)
    before, after = (seen[name]["facts"]["logprobs"] for name in ("dense", "dense+packed"))
    for some, others in zip(before, after, strict=True):
        assert max(abs(one - other) for one, other in zip(some, others, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (VERSIONS[0], "experts"),
        # Half a minute by start, and a front of this kind has its coverage proven and read back in every run.
        *(pytest.param(version, "dense+lora", marks=pytest.mark.long_run) for version in VERSIONS),
    ],
)
def test_two_workers_cover_the_checkpoint_together(programs: Programs, version: str, name: str) -> None:
    answer = programs.answer(
        "trace_two_workers", version, name, VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_LOGGING_LEVEL="ERROR"
    )
    assert [seen["name"] for seen in answer] == [name]
    for seen in answer:
        assert seen["problems"] == [], seen["name"]
        assert seen["outputs_stay"], seen["name"]
        # What both hold in full is replicated: norms, and the router of experts.
        parts = [
            name for name in seen["in_part_on_one"] if "norm" in name or name.endswith("mlp.gate.weight")
        ]
        assert parts == []
        assert any("q_proj" in name for name in seen["in_part_on_one"])
        assert [worker["differences"] for worker in seen["workers"]] == [[], []], seen["name"]
        assert [worker["changed"] for worker in seen["workers"]] == [[], []], seen["name"]
        assert [worker["maps_differ"] for worker in seen["workers"]] == [[], []], seen["name"]
