"""What an `LLM` says to a prompt that old weights cached: after a sync, and where the cache is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

import weightlane as wl
from weightlane.program import Lifecycle
from weightlane_vllm import requests
from weightlane_vllm.llm_calls import LlmCalls

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = list(range(3, 203))  # more than one block of the cache

Said: TypeAlias = tuple[list[int], list[float]]
"""Greedy tokens after a prompt, and their log-probs."""


@dataclass(frozen=True)
class CachedPrefix:
    """An engine and a trainer's model; `change` moves the model's weights by a seed."""

    llm: Any
    model: Any
    change: Callable[[int], None]
    by_the_trainer: Callable[[list[int]], Said]
    by_the_engine: Callable[[list[int]], Said]

    def distances(self) -> dict[str, float]:
        """Of log-probs, infinite where tokens differ; `kept` is the control."""
        emptied = self._after_a_sync(900)
        kept = patch.object(requests, "plan_lifecycle", lambda facts, phase, release: Lifecycle())
        with kept, patch.object(LlmCalls, "publishing_rpc", LlmCalls.collective_rpc):
            old = self._after_a_sync(901)
        self.llm.reset_prefix_cache()
        return {"emptied": emptied, "kept": old}

    def _after_a_sync(self, seed: int) -> float:
        with wl.connect(
            trainer=wl.trainer("torch", model=self.model), rollout=[wl.rollout("vllm", engine=self.llm)]
        ) as lane:
            self.by_the_engine(PROMPT)
            self.change(seed)
            lane.sync(version=1)
            expected, given = self.by_the_trainer(PROMPT), self.by_the_engine(PROMPT)
        if given[0] != expected[0]:
            return float("inf")
        return max(abs(a - b) for a, b in zip(given[1], expected[1], strict=True))
