"""What a user may choose of an FSDP export, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from weightlane.errors import ExportError, near_names

if TYPE_CHECKING:
    from collections.abc import Mapping

Precision: TypeAlias = Literal["master", "compute"]
"""`master`: the values that the optimizer steps; `compute`: cast to the parameter dtype of the mixed
precision policy, as the trainer's own forward casts them."""

BufferChoice: TypeAlias = Literal["agree", "rank0"]
"""`agree`: ranks whose copies differ fail the sync; `rank0`: rank 0's are sent."""

Staging: TypeAlias = Literal["parts", "shard"]
"""For a shard that lies on the CPU while its group computes on a GPU. `parts`: each part is brought there
when it is gathered; `shard`: all before the first bucket, in copies that are dropped after the last."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "buffers": get_args(BufferChoice),
    "staging": get_args(Staging),
}
NAMES = frozenset({*_CHOICES, "adapter"})


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `wl.trainer("fsdp", ...)`; `adapter` is None where none was named."""

    precision: Precision = "master"
    buffers: BufferChoice = "agree"
    staging: Staging = "parts"
    adapter: str | None = None


def read_options(given: Mapping[str, object]) -> Options:
    """The options, each one of its choices.

    Raises:
        ExportError: one is not; names the nearest.
    """
    chosen = {}
    for name, choices in _CHOICES.items():
        value = given.get(name, choices[0])
        if value not in choices:
            near = near_names(str(value), choices)
            raise ExportError(
                f"{name}={value!r} is unknown to trainer 'fsdp'.",
                f"It is one of {', '.join(choices)}.",
                f"Use {near[0]!r}." if near else "Correct trainer(...).",
            )
        chosen[name] = value
    adapter = given.get("adapter")
    return Options(
        precision=cast("Precision", chosen["precision"]),
        buffers=cast("BufferChoice", chosen["buffers"]),
        staging=cast("Staging", chosen["staging"]),
        adapter=None if adapter is None else str(adapter),
    )
