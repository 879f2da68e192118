"""One adapter configuration out of those of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import Problem
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.manifest import RankManifest
    from weightlane.peft import AdapterConfig


def agreed_adapter(parts: Sequence[RankManifest]) -> tuple[AdapterConfig | None, list[Problem]]:
    """The adapter that all ranks describe, with every rank's modules; None outside phase ADAPTER.

    A rank that holds nothing (model None, placement `partitioned`) has no say.
    """
    from msgspec.structs import replace

    told = [(part.rank, part.adapter) for part in parts if part.adapter is not None]
    wanted = parts[0].phase is Phase.ADAPTER
    if not wanted or not told:
        problem = Problem(
            "adapter-config", "adapter", f"no rank described one for phase {Phase.ADAPTER.value}"
        )
        return None, [problem] if wanted else []
    first_rank, first = told[0]
    problems = [
        Problem(
            "rank-disagreement",
            f"adapter {first.name}",
            f"rank {rank} has {_words(other)}, rank {first_rank} {_words(first)}",
            "Give every rank the same adapter.",
        )
        for rank, other in told[1:]
        if replace(other, target_modules=()) != replace(first, target_modules=())
    ]
    modules = dict.fromkeys(module for _, config in told for module in config.target_modules)
    return replace(first, target_modules=tuple(modules)), problems


def agreed_base(parts: Sequence[RankManifest]) -> tuple[dict[str, str], list[Problem]]:
    """Digests of the base by name, over all ranks; values that differ between ranks are a problem."""
    base: dict[str, str] = {}
    problems: list[Problem] = []
    for part in parts:
        for name, digest in part.base.items():
            if base.setdefault(name, digest) != digest:
                what = f"rank {part.rank} holds other base values than an earlier rank"
                fix = "Load the same checkpoint on every rank."
                problems.append(Problem("rank-disagreement", name, what, fix))
    return base, problems


def _words(config: AdapterConfig) -> str:
    return f"{config.name!r} of rank {config.rank} and alpha {config.alpha:g}"
