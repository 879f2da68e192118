"""One adapter configuration out of those of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import Problem
from weightlane.peft import AdapterConfig, adapter_of_modules
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.manifest import RankManifest
    from weightlane.peft import ModuleLora


_MOST_NAMED = 8


def agreed_adapter(parts: Sequence[RankManifest]) -> tuple[AdapterConfig | None, list[Problem]]:
    """The adapter that all ranks describe, with every rank's modules; None outside phase ADAPTER.

    A rank that holds nothing (model None, placement `partitioned`) has no say. Ranks may hold different
    modules, with ranks and scales of their own; a module that several hold must be the same on each.
    """
    told = [(part.rank, part.adapter) for part in parts if part.adapter is not None]
    wanted = parts[0].phase is Phase.ADAPTER
    if not wanted or not told:
        problem = Problem(
            "adapter-config", "adapter", f"no rank described one for phase {Phase.ADAPTER.value}"
        )
        return None, [problem] if wanted else []
    first_rank, first = told[0]
    modules: dict[str, ModuleLora] = {}
    problems: list[Problem] = []
    for rank, config in told:
        if (config.name, config.features) != (first.name, first.features) or any(
            modules.get(module, lora) != lora for module, lora in config.modules.items()
        ):
            problems.append(
                Problem(
                    "rank-disagreement",
                    f"adapter {first.name}",
                    f"rank {rank} has {_words(config)}, rank {first_rank} {_words(first)}",
                    "Give every rank the same adapter.",
                )
            )
        modules = {**config.modules, **modules}
    # In the order of the first rank, then of what only later ones hold.
    ordered = dict.fromkeys(module for _, config in told for module in config.target_modules)
    together = {module: modules[module] for module in ordered}
    return adapter_of_modules(first.name, together, first.features), problems


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
    words = [f"{config.name!r} of rank {config.rank} and alpha {config.alpha:g}"]
    words += [f"{module} of rank {lora.rank} and alpha {lora.alpha:g}" for module, lora in config.own.items()]
    words += [f"{key} {value}" for key, value in config.features.items()]
    shown = words[:_MOST_NAMED]
    return ", ".join(shown if len(shown) == len(words) else [*shown, f"and {len(words) - len(shown)} more"])
