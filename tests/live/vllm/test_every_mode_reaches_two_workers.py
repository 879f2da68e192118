"""Pairs of mode, trainer, ranks, transport and swap policy, each into both workers of tensor parallel 2.

Every way that a tiny model can go is taken once with each of the others' kinds; each sync moves the trainer's
log-probs and the engine follows to within 1e-4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import live_ways
import pytest

from weightlane.front.client import FrontEndpoint
from weightlane.testing.parity_run import run_parity
from weightlane_vllm.facts import PLAIN_CPU_WEIGHTS
from weightlane_vllm.launch import LoraStart
from weightlane_vllm.patches import CPU_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from weightlane.front.process import FrontProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

SYNCS = 3


@dataclass(frozen=True)
class Way:
    """One way of weights; `phases` are those of the first sync, of which a later one has the last alone."""

    ranks: int
    options: dict[str, str | int]
    phases: tuple[str, ...] = ("full",)
    plan_says: str = "coverage proven"
    marks: tuple[pytest.MarkDecorator, ...] = field(default=())

    @property
    def kind(self) -> live_ways.Way:
        """What it is of the table."""
        mode = str(self.options.get("mode", "full"))
        trainer = str(self.options.get("trainer", "torch"))
        return live_ways.Way("our front", "tiny", 2, str(self.options.get("swap", mode)), trainer)

    @property
    def name(self) -> str:
        return "-".join([*(str(value) for value in self.options.values()), f"from-{self.ranks}"])


def cases(*ways: Way) -> pytest.MarkDecorator:
    values = [pytest.param(way, id=way.name, marks=[*way.marks, *live_ways.shown(way.kind)]) for way in ways]
    return pytest.mark.parametrize("way", values)


def followed(way: Way, model: Path, front: FrontProcess) -> None:
    found = run_parity(
        model=model,
        engine="vllm",
        url=front.address,
        ranks=way.ranks,
        syncs=SYNCS,
        seconds=400,
        options={"bucket-bytes": 1 << 16, **way.options},
        plan_says=way.plan_says,
    )
    assert [parity.phases for parity in found] == [way.phases, *[way.phases[-1:]] * (SYNCS - 1)]
    assert all("digests equal on 2" in parity.verified[0] for parity in found)


@pytest.mark.requirement("R16")
@cases(
    Way(1, {"transport": "inline"}),
    Way(2, {"transport": "shm"}, marks=(pytest.mark.long_run,)),
    Way(2, {"transport": "disk"}),
    Way(4, {"transport": "shm", "placement": "partitioned"}),
)
def test_full_weights_from_every_number_of_ranks(
    tiny_front: FrontProcess, tiny_folder: Path, way: Way
) -> None:
    followed(way, tiny_folder, tiny_front)


SHARDED: dict[str, str | int] = {"trainer": "fsdp", "training": "optimizer"}
ADAPTER: dict[str, str | int] = {"mode": "adapter", "learning-rate": 0.05}
# In this order: each leaves a base in the engine that the next one's trainer does not have.
WITH_LORA = (
    Way(2, {**SHARDED, "mode": "full"}),
    Way(2, {**SHARDED, **ADAPTER, "swap": "two_slot"}, phases=("base", "adapter")),
    Way(2, {**SHARDED, "mode": "merged", "learning-rate": 0.05, "transport": "inline"}, phases=("merged",)),
    Way(2, {**SHARDED, **ADAPTER, "swap": "paused"}, phases=("base", "adapter")),
)
MORE_WITH_LORA = (
    Way(1, {"mode": "full"}),
    Way(1, {"mode": "adapter", "noise": 1, "swap": "two_slot"}, phases=("base", "adapter")),
    Way(1, {"mode": "merged", "noise": 1}, phases=("merged",)),
    Way(1, {"mode": "adapter", "noise": 1, "swap": "paused"}, phases=("base", "adapter")),
)


@pytest.mark.requirement("R91", part="FSDP, three syncs of a small model at TP 2")
@cases(*WITH_LORA)
def test_with_lora_on(lora_front: FrontProcess, tiny_folder: Path, way: Way) -> None:
    followed(way, tiny_folder, lora_front)


@pytest.fixture(scope="module")
def packed_front(
    start_front: Callable[..., AbstractContextManager[FrontProcess]], tiny_folder: Path
) -> Iterator[FrontProcess]:
    """Workers whose linear weights stay packed, and so are loaded by vLLM's layerwise reload."""
    environment = {CPU_WEIGHTS: "packed"}
    with start_front(tiny_folder, 2, LoraStart(slots=4, rank=16), environment=environment) as process:
        yield process


@pytest.mark.long_run  # in every run an `LLM` of one's own stands for packed weights
@cases(*WITH_LORA, *MORE_WITH_LORA)
def test_packed_weights_are_reloaded_in_both(packed_front: FrontProcess, tiny_folder: Path, way: Way) -> None:
    assert not FrontEndpoint(packed_front.address, 60.0).facts().attributes[PLAIN_CPU_WEIGHTS]
    followed(way, tiny_folder, packed_front)


@pytest.fixture(scope="module")
def older_front(
    start_front: Callable[..., AbstractContextManager[FrontProcess]], tiny_folder: Path, vllm_older: Path
) -> Iterator[FrontProcess]:
    """The era of `.base_layer` names."""
    with start_front(tiny_folder, 2, LoraStart(slots=4, rank=16), older=vllm_older) as process:
        yield process


@pytest.mark.long_run  # in every run an `LLM` of one's own stands for this era
@cases(*WITH_LORA, *MORE_WITH_LORA)
@pytest.mark.parametrize("version", [live_ways.OLDER])
def test_with_lora_on_before_wrappers_loaded_themselves(
    older_front: FrontProcess, tiny_folder: Path, way: Way, version: str
) -> None:
    assert FrontEndpoint(older_front.address, 60.0).facts().version == version
    followed(way, tiny_folder, older_front)
