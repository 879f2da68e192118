"""A model class's `WeightsMapper`, as data: what it makes of a name, without vLLM.

Its tables are applied one after another, and the entries of each in their order, each to what the one before
left, without stopping at the first that fits: the order is part of the meaning. Names only; the shard that a
stacked entry stands for is told by the name itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightlane.receiver import NameRules, WorkerDescription

if TYPE_CHECKING:
    from torch import nn

Table = Mapping[str, "str | None"]


@dataclass(frozen=True, slots=True)
class NameMapper:
    """The tables of one model class. A value of None means that the loader passes over such a name."""

    patterns: Table = field(default_factory=dict)
    substrings: Table = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    prefixes: Table = field(default_factory=dict)
    suffixes: Table = field(default_factory=dict)

    @classmethod
    def of(cls, worker: WorkerDescription) -> NameMapper:
        """The tables that a worker tells of its model."""
        rules = worker.rules
        return cls(rules.patterns, rules.substrings, rules.stacked, worker.renames, rules.suffixes)

    def mapped(self, name: str) -> str | None:
        """What the loader looks up for `name`; None where it passes over it."""
        return self._through(name, self.stacked)

    def renamed(self, name: str) -> str | None:
        """The same without stacking: the piece keeps its own name (`q_proj`, not `qkv_proj`)."""
        return self._through(name, {})

    def _through(self, name: str, stacked: Mapping[str, str]) -> str | None:
        steps: tuple[tuple[Table, _Step], ...] = (
            (self.patterns, _pattern),
            (self.substrings, _substring),
            (stacked, _substring),
            (self.prefixes, _prefix),
            (self.suffixes, _suffix),
        )
        for table, step in steps:
            for piece, new in table.items():
                changed = step(name, piece, new or "")
                if changed is None:
                    continue
                if new is None:
                    return None
                name = changed
        return name


_Step = Callable[[str, str, str], "str | None"]
"""A name, a piece of it and what becomes of that: the changed name, or None where the piece is not in it."""


def _pattern(name: str, piece: str, new: str) -> str | None:
    return re.sub(piece, new, name) if re.search(piece, name) else None


def _substring(name: str, piece: str, new: str) -> str | None:
    return name.replace(piece, new, 1) if piece in name else None


def _prefix(name: str, piece: str, new: str) -> str | None:
    return new + name[len(piece) :] if name.startswith(piece) else None


def _suffix(name: str, piece: str, new: str) -> str | None:
    return name[: len(name) - len(piece)] + new if name.endswith(piece) else None


def read_rules(model: nn.Module, *, wrapper_loads: bool) -> NameRules:
    """What a live model declares of names, beyond `packed_modules_mapping` and renamed prefixes."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    patterns = getattr(mapper, "orig_to_new_regex", None) or {}
    stacked = getattr(mapper, "orig_to_new_stacked", None) or {}
    prefixes = {getattr(module, "lora_base_layer_prefix", "") for module in model.modules()}
    return NameRules(
        patterns={
            **_renamings(mapper),
            **{getattr(pattern, "pattern", pattern): new for pattern, new in patterns.items()},
        },
        substrings=dict(getattr(mapper, "orig_to_new_substr", None) or {}),
        stacked={piece: new if isinstance(new, str) else new[0] for piece, new in stacked.items()},
        suffixes=dict(getattr(mapper, "orig_to_new_suffix", None) or {}),
        wrapper_loads=wrapper_loads,
        expert_prefix=next((prefix for prefix in sorted(prefixes) if prefix), ""),
    )


def renamed_prefixes(model: nn.Module) -> dict[str, str]:
    """Checkpoint prefixes that the model class renames. One mapped to None is dropped by the loader."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = getattr(mapper, "orig_to_new_prefix", None) or {}
    return {old: new for old, new in prefixes.items() if new is not None}


def _renamings(mapper: Any) -> dict[str, str | None]:
    """Renames that the mapper has as objects of transformers (its Transformers backend), applied first.

    One that is limited to a part of the model is left out: a name that needs it reaches nothing.
    """
    found: dict[str, str | None] = {}
    for renaming in getattr(mapper, "orig_to_new_renaming", None) or ():
        if getattr(renaming, "scope_prefix", None) is None:
            pairs = zip(renaming.source_patterns, renaming.target_patterns, strict=False)
            found.update({source.replace("*.", r".*\."): target for source, target in pairs})
    return found
