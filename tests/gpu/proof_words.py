"""What engines are asked to say, and whether a synced one says what one started from the weights does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import torch
from run_spread import Said, largest_difference, spread_of
from told_apart import as_good_as, compare

from weightlane.program import EngineCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    Side = tuple["Engine", Any]

BATCH_INVARIANT = "batch-invariant"
"""vLLM's VLLM_BATCH_INVARIANT: its LoRA kernels split no sum then, so every run says the same."""
PROMPTS = [[(7 * row + 11 * column) % 500 + 1 for column in range(8)] for row in range(6)]
TEXT = [37 * number % 500 + 1 for number in range(120)]
TOKENS = 12
GREEDY_RUNS = 8
SCORED_RUNS = 32
SECONDS = 300.0


@torch.no_grad()
def _scaled(wrapped: Any) -> None:
    for name, parameter in wrapped.named_parameters():
        if ".lora_B" in name:
            parameter.mul_(1.02)


@torch.no_grad()
def _without_one_module(wrapped: Any) -> None:
    last = [parameter for name, parameter in wrapped.named_parameters() if ".lora_B" in name][-1]
    last.zero_()


WRONG = {"scaled by 1.02": _scaled, "one module's left out": _without_one_module}
"""Controls: adapters that are slightly wrong, which must be told from the right one."""


class Engine(Protocol):
    """One that can be asked to `generate`, to `score` and for its `hashes`: each a word and a JSON object."""

    def call(self, call: EngineCall, /) -> str: ...


class Words:
    """Asks engines, and judges what they said.

    Args:
        kernels: Those that the engines run; with `BATCH_INVARIANT` log-probs must be equal, to the bit.
        title: The engine's name, for those of checks.
        runs: Of each side over the one given text.
    """

    def __init__(self, kernels: str, title: str, *, runs: int = SCORED_RUNS) -> None:
        self.exact = kernels == BATCH_INVARIANT
        self.title = title
        self.runs = runs

    def greedy(self, side: Side) -> Said:
        """Continuations of the prompts."""
        engine, adapter = side
        asked = {"prompts": PROMPTS, "tokens": TOKENS, "adapter": adapter}
        return Said.of(
            json.loads(engine.call(EngineCall(f"generate {json.dumps(asked)}", timeout_seconds=SECONDS)))
        )

    def scored(self, *sides: Side) -> list[list[Said]]:
        """Runs over one given text: of each side as many, taken in turn so that time favours none."""
        found: list[list[Said]] = [[] for _ in sides]
        for number in range(self.runs + 1):
            for (engine, adapter), runs in zip(sides, found, strict=True):
                asked = {"text": TEXT, "adapter": adapter}
                answer = engine.call(EngineCall(f"score {json.dumps(asked)}", timeout_seconds=SECONDS))
                if number:  # the first one compiles kernels, or loads what is read from a folder
                    runs.append(Said.of(json.loads(answer)))
        return found

    def same(self, synced: Engine, other: Engine) -> tuple[bool, dict[str, Any]]:
        """Of engines without an adapter; passed, and the figures."""
        mine = [self.greedy((synced, None)) for _ in range(GREEDY_RUNS)]
        reference = [self.greedy((other, None)) for _ in range(GREEDY_RUNS)]
        compared = compare(mine, reference)
        told = {**compared.told(), "largest difference": _across(mine, reference)}
        told["first tokens"] = mine[0].tokens[0][:6]
        passed = told["largest difference"] == 0.0 if self.exact else not compared.told_apart
        return passed, told

    def judged(
        self, sides: tuple[Side, Side], right: list[list[Said]], wrong: dict[str, list[list[Said]]]
    ) -> Iterator[tuple[str, bool, Any]]:
        """Of engines with an adapter: names of checks, whether passed, and the figures.

        Args:
            sides: The synced engine with the lane's adapter, and the other with what the engine itself read.
            right: What was scored by the first; by it with what the engine itself read; and by the other.
            wrong: Under each control's name, what the first two scored after a sync of that adapter.
        """
        controls = {name: compare(*runs) for name, runs in wrong.items()}
        for name, control in controls.items():
            yield f"control, {name}, is told apart", control.told_apart, control.told()
        smallest = min(controls.values(), key=lambda control: control.energy)
        ours, *others = right
        own = f"{self.title}'s own in the same engine"
        for name, theirs in zip((own, "a started engine's"), others, strict=True):
            compared = compare(ours, theirs)
            told = {**compared.told(), "largest difference": _across(ours, theirs)}
            told["own spread"] = [spread_of(ours), spread_of(theirs)]
            if smallest.energy:  # else the control is not told apart, and has failed
                told["energy beside the smallest control's"] = compared.energy / smallest.energy
            passed = told["largest difference"] == 0.0 if self.exact else as_good_as(compared, smallest)
            yield f"log-probs as {name}", passed, told
        if self.exact:  # else batches differ from run to run, and scores over one text say more
            mine, reference = ([self.greedy(side) for _ in range(GREEDY_RUNS)] for side in sides)
            told = {**compare(mine, reference).told(), "largest difference": _across(mine, reference)}
            yield "generated log-probs as a started engine's", told["largest difference"] == 0.0, told


def _across(ours: list[Said], theirs: list[Said]) -> float:
    return max(largest_difference(one, two) for one in ours for two in theirs)
