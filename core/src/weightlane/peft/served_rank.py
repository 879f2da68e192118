"""The rank of a run's LoRA: one accessor for every place where a training configuration may hold it.

verl's model block has `lora_rank` beside a nested block `lora` with `rank`; each of its parts reads another
(verl #4632, #7234). Rank 0 and None mean that there is no LoRA.
"""

from __future__ import annotations

from typing import Any

from weightlane.errors import PlanError, Problem
from weightlane.peft.plain_values import fields_of

_FLAT = ("lora_rank", "r", "rank", "dim")


def lora_rank(config: object) -> int:
    """The declared rank, wherever it stands; 0 where there is no LoRA.

    Args:
        config: a model block with `lora_rank`, a nested block `lora`, or both; a LoRA block (`rank`, `dim`);
            a peft configuration (`r`). None is no LoRA.

    Raises:
        PlanError: two places hold different ranks, or one is no whole number.
    """
    if config is None:
        return 0
    told = {place: value for place, value in _places(fields_of(config)).items() if value}
    problems = [
        Problem("peft-config", place, f"the rank is {value!r}, not a whole number of 0 or more")
        for place, value in told.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 0
    ]
    if not problems and len(set(told.values())) > 1:
        what = f"the ranks are {', '.join(f'{place} {value}' for place, value in told.items())}"
        problems = [Problem("peft-config", "rank", what, "Set one of them, and leave the other at 0.")]
    if problems:
        raise PlanError(problems)
    return next(iter(told.values()), 0)


def served_rank(config: object) -> int:
    """The rank that an engine must be started for: 0 without LoRA, and where it is merged into the base."""
    rank = lora_rank(config)
    fields = {} if config is None else fields_of(config)
    nested = fields.get("lora")
    merged = fields.get("merge") or (isinstance(nested, dict) and nested.get("merge"))
    return 0 if merged else rank


def _places(fields: dict[str, Any]) -> dict[str, Any]:
    found = {key: fields[key] for key in _FLAT if key in fields}
    nested = fields.get("lora")
    if isinstance(nested, dict):
        found |= {f"lora.{key}": nested[key] for key in _FLAT if key in nested}
    return found
