"""The ways that weights go into a live vLLM: tests tell theirs by a mark, and `WAYS.md` is made of the marks.

A way is shown by a test that makes at least three syncs by it (in every run two of the real model from FSDP),
each of which moves the trainer's log-probs by 1e-2 and leaves the engine's greedy tokens equal and its
log-probs within 1e-4. What only some of these tests do beside that (long prompts, requests that run, a
restart) their names say.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

PLACES = ("in-process LLM", "multiprocess LLM", "AsyncLLM", "our front", "OpenAI server")
"""An engine object of rank 0 (the first three), `python -m weightlane_vllm.server`, or vLLM's own server.

Our front holds a multiprocess `LLM` and drives it by the same calls: in every run it stands for one."""
MODES = ("full", "merged", "two_slot", "paused")
"""The lane's mode; mode adapter by its swap policy: its first sync brings the base, then the adapter."""
TRAINERS = ("torch", "fsdp")
MODELS = ("tiny", "real")
"""A Qwen3 of two layers, and SmolLM2-135M (at TP 2 in its folder for that)."""
TENSOR_PARALLEL = (1, 2)
NEWEST, OLDER = "0.32", "0.27.1"


@dataclass(frozen=True, order=True, slots=True)
class Way:
    """From a trainer to a place, in a mode."""

    place: str
    model: str
    tensor_parallel: int
    mode: str
    trainer: str
    version: str = NEWEST

    def __post_init__(self) -> None:
        for value, known in (
            (self.place, PLACES),
            (self.model, MODELS),
            (self.tensor_parallel, TENSOR_PARALLEL),
            (self.mode, MODES),
            (self.trainer, TRAINERS),
            (self.version, (NEWEST, OLDER)),
        ):
            if value not in known:
                raise ValueError(f"{value!r} is none of {known}")


PAIRS = (
    ("place", "mode"),  # and so every swap policy in every place
    ("mode", "tensor_parallel"),
    ("mode", "trainer"),
    ("place", "version"),
    ("tensor_parallel", "trainer"),
    ("model", "tensor_parallel"),
    ("model", "trainer"),
)
"""Two things of which every pair is in every run; what `NEVER` holds is left out."""
NEVER = frozenset((place, OLDER) for place in PLACES[1:])
"""0.27.1 is in every run as an `LLM` of the trainer's process; long runs have it elsewhere."""
OLDER_IN_EVERY_RUN = ("full", "two_slot", "paused")
"""The base and the adapter: what 0.27.1 has to be shown with."""


def shown(*ways: Way) -> list[pytest.MarkDecorator]:
    """The marks of a test that shows these."""
    return [pytest.mark.way(way) for way in ways]


def every_way() -> Iterator[Way]:
    """Of the newest version: what a long run has to show."""
    for values in itertools.product(PLACES, MODELS, TENSOR_PARALLEL, MODES, TRAINERS):
        yield Way(*values)


def missing_pairs(ways: Collection[Way]) -> list[str]:
    """What `PAIRS` asks for and none of `ways` has."""
    values = {
        "place": PLACES,
        "mode": MODES,
        "trainer": TRAINERS,
        "model": MODELS,
        "tensor_parallel": TENSOR_PARALLEL,
        "version": (NEWEST, OLDER),
    }
    ways = [*ways, *(replace(way, place=PLACES[1]) for way in ways if way.place == PLACES[3])]
    missing = []
    for one, other in PAIRS:
        newest_alone = "version" not in (one, other)
        held = {
            (getattr(way, one), getattr(way, other))
            for way in ways
            if way.version == NEWEST or not newest_alone
        }
        wanted = set(itertools.product(values[one], values[other])) - NEVER
        missing += [f"{one} {pair[0]}, {other} {pair[1]}" for pair in sorted(wanted - held, key=str)]
    return missing


def table(every_run: Iterable[Way], long_run: Iterable[Way]) -> str:
    """`WAYS.md`: a row for each engine, a column for each mode."""
    now, later = set(every_run), set(long_run)
    lines = [
        "# Ways into a live vLLM",
        "",
        "Made from the marks of the tests in this folder by `python tests/live/vllm/ways/write_table.py`;",
        "`tests/workspace/test_live_ways_are_covered.py` fails where it is old. **bold**: shown in every run",
        "(`nox -s live_vllm`); plain: in long runs (`nox -s live_vllm -- --syncs 10`). What a way is, and",
        "what shows it, `live_ways.py` says.",
        "",
        "| vLLM | place | model | TP | " + " | ".join(MODES) + " |",
        "|---" * (4 + len(MODES)) + "|",
    ]
    for version, place, model, tensor_parallel in itertools.product(
        (NEWEST, OLDER), PLACES, MODELS, TENSOR_PARALLEL
    ):
        cells = [
            ", ".join(
                f"**{trainer}**" if way in now else trainer
                for trainer in TRAINERS
                if (way := Way(place, model, tensor_parallel, mode, trainer, version)) in now | later
            )
            for mode in MODES
        ]
        if any(cells):
            row = (version, place, model, str(tensor_parallel), *cells)
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, ""])
