"""Every mode, from either trainer, into every place that vLLM is driven in, at both sizes: `WAYS.md`.

One engine a test; its lanes follow one another, and each leaves a base there that the next one's trainer
does not have. Prompts are longer than a block of the prefix cache, and the same at each sync: a stale hit
would show.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live_ways import PLACES, TENSOR_PARALLEL, Way, shown
from openai_server import start_openai

import weightlane
import weightlane_fsdp
import weightlane_vllm
from weightlane.adapters import AdapterRef
from weightlane.front.client import FrontEndpoint
from weightlane.testing.parity_run import held_parities, run_parity
from weightlane.testing.ranks import RankGroup
from weightlane_vllm.launch import FrontStart, LoraStart, front_environment

if TYPE_CHECKING:
    from openai_server import OpenAi

    from weightlane.testing.parity_result import SyncParity

pytestmark = [pytest.mark.live, pytest.mark.timeout(7200)]

PROGRAM = Path(__file__).parent / "programs/parity_into_own_engine.py"
FOLDERS = {1: "SmolLM2-135M-Instruct", 2: "SmolLM2-135M-Instruct-tp2"}
OWN = {"in-process LLM": "in-process", "multiprocess LLM": "multiprocess", "AsyncLLM": "async"}
SYNCS = 3
SECONDS = 3000.0
AGREES = 1e-4
HTTP_PROMPTS = ((1, 2, 3, 4, 5), tuple(range(3, 203)))


@dataclass(frozen=True)
class Engine:
    """One vLLM and the lanes into it: mode (of an adapter: its swap) and trainer."""

    place: str
    model: str
    tensor_parallel: int
    lanes: tuple[tuple[str, str], ...]
    part: str

    @property
    def ranks(self) -> int:
        """Those of the trainer. A worker of vLLM in rank 0 takes the group it finds there for its own."""
        return 1 if self.place == "in-process LLM" and self.tensor_parallel == 1 else 2

    def options(self, mode: str, trainer: str) -> dict[str, str | int]:
        """Of the parity program, for one lane."""
        rate = "1e-3" if self.model == "real" else "2e-2" if mode == "full" else "5e-2"
        told: dict[str, str | int] = {"trainer": trainer, "training": "optimizer", "learning-rate": rate}
        told |= {"tokens": 6, "prompt-tokens": 150}
        if self.model == "tiny":
            told["bucket-bytes"] = 1 << 16
        if mode in ("two_slot", "paused"):
            return {**told, "mode": "adapter", "swap": mode}
        return {**told, "mode": mode}


def value(engine: Engine) -> Any:
    ways = [
        Way(engine.place, engine.model, engine.tensor_parallel, mode, trainer)
        for mode, trainer in engine.lanes
    ]
    words = (engine.place.replace(" ", "-"), engine.model, f"tp{engine.tensor_parallel}", engine.part)
    return pytest.param(engine, id="-".join(words), marks=[pytest.mark.long_run, *shown(*ways)])


FROM_TORCH, FROM_FSDP = (
    tuple((mode, trainer) for mode in ("full", "two_slot", "merged", "paused"))
    for trainer in ("torch", "fsdp")
)
EVERYWHERE = tuple((place, size) for size in TENSOR_PARALLEL for place in PLACES)
ENGINES = (
    *(Engine(place, "tiny", size, FROM_TORCH + FROM_FSDP, "all") for place, size in EVERYWHERE),
    # Two for the real model, which takes minutes by each.
    *(Engine(place, "real", size, FROM_TORCH, "torch") for place, size in EVERYWHERE),
    *(Engine(place, "real", size, FROM_FSDP, "fsdp") for place, size in EVERYWHERE),
)


@pytest.mark.parametrize("engine", [value(engine) for engine in ENGINES])
def test_three_syncs_by_each_lane(
    engine: Engine, request: pytest.FixtureRequest, vllm_python: Path, tmp_path: Path
) -> None:
    if engine.model == "real":
        model = request.getfixturevalue("models_dir") / FOLDERS[engine.tensor_parallel]
    elif engine.place == "OpenAI server":
        model = request.getfixturevalue("tokenized_folder")
    else:
        model = request.getfixturevalue("tiny_folder")
    if engine.place in OWN:
        found = into_own(engine, model, vllm_python)
    elif engine.place == "our front":
        with request.getfixturevalue("start_front")(
            model, engine.tensor_parallel, LoraStart(slots=4, rank=16)
        ) as process:
            found = [into_front(engine, model, process.address, *lane) for lane in engine.lanes]
    else:
        with start_openai(
            vllm_python, model, tmp_path / "serve.log", tensor_parallel=engine.tensor_parallel
        ) as server:
            found = [into_server(engine, model, server, *lane) for lane in engine.lanes]
    for (mode, _), parities in zip(engine.lanes, found, strict=True):
        first = ("base", "adapter") if mode in ("two_slot", "paused") else (mode,)
        assert [parity.phases for parity in parities] == [first, *[first[-1:]] * (SYNCS - 1)]
        assert [parity.versions for parity in parities] == [(sync,) * 3 for sync in range(1, SYNCS + 1)]


def into_own(engine: Engine, model: Path, python: Path) -> list[list[SyncParity]]:
    """Rank 0 has the engine; all ranks run in its environment, with the trainer's plugin on their path."""
    lanes = [
        shlex.join(word for name, told in engine.options(*lane).items() for word in (f"--{name}", str(told)))
        for lane in engine.lanes
    ]
    words = [str(PROGRAM), OWN[engine.place], str(model), str(engine.tensor_parallel), str(SYNCS), *lanes]
    environment = dict(front_environment(FrontStart(str(model), "", "cpu", engine.tensor_parallel)))
    folders = [
        str(Path(package.__file__).parents[1]) for package in (weightlane, weightlane_vllm, weightlane_fsdp)
    ]
    environment["PYTHONPATH"] = ":".join(folders)
    with RankGroup(words, engine.ranks, environment=environment, python=str(python)) as group:
        outcomes = group.wait(SECONDS, after_a_failure=60.0)
    return held_parities(outcomes, [SYNCS] * len(lanes), plan_says="coverage proven")


def into_front(engine: Engine, model: Path, address: str, mode: str, trainer: str) -> list[SyncParity]:
    return run_parity(
        model=model,
        engine="vllm",
        url=address,
        ranks=engine.ranks,
        syncs=SYNCS,
        seconds=SECONDS,
        options=engine.options(mode, trainer),
        plan_says="coverage proven",
    )


def into_server(engine: Engine, model: Path, server: OpenAi, mode: str, trainer: str) -> list[SyncParity]:
    """Over HTTP the server then says what its front says, which was compared with the trainer."""
    found = into_front(engine, model, server.front, mode, trainer)
    ref = {
        "two_slot": AdapterRef(f"default@{SYNCS}", SYNCS),
        "paused": AdapterRef("default", SYNCS),
    }.get(mode)
    over_http = server.complete(HTTP_PROMPTS, ref.name if ref else "")
    by_front = FrontEndpoint(server.front, 120.0).generate(HTTP_PROMPTS, max_tokens=12, adapter=ref)
    for here, there in zip(over_http, by_front, strict=True):
        assert here.token_ids == there.token_ids
        pairs = zip(here.logprobs, there.logprobs, strict=True)
        assert max(abs(one - other) for one, other in pairs) <= AGREES
    return found
