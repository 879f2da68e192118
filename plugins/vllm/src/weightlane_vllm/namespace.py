"""One model's live names, made ready once for looking names up: packing inverted, wrapped modules found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane_vllm.experts import expert_stacks, fused_alias, one_expert, stack_alias
from weightlane_vllm.loader_renames import loader_names
from weightlane_vllm.mapper import NameMapper

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from weightlane.receiver import WorkerDescription

BASE = "base_layer"
SEGMENT = f".{BASE}."
SAME_NAME = "same name"
WRAPPED = "inside its LoRA wrapper"


@dataclass(frozen=True, slots=True)
class Landing:
    """The live tensor that a name reaches, the rules that led there and the part of a fused tensor it is."""

    target: str
    rule: str = SAME_NAME
    shard: str = ""


def without_segment(name: str) -> str:
    """`name` without its first wrapper segment. A leading one has no module and stays."""
    return name.replace(SEGMENT, ".", 1)


def with_segment(name: str) -> str:
    """`name` with the wrapper's segment before its last part; as it is where it has no module."""
    module, dot, leaf = name.rpartition(".")
    return f"{module}{SEGMENT}{leaf}" if dot else name


class Namespace:
    """Live names of one model, its mapper and its packed modules.

    Args:
        live: names of parameters and buffers.
        mapper: the model class's own.
        packed: fused module to its pieces; a piece may have several owners, which are tried in this order.
        wrapper_loads: a LoRA wrapper loads plain names for itself (`_HAS_LORA_LOAD_WEIGHTS`).
        expert_prefix: see `weightlane.receiver.NameRules`.
    """

    def __init__(
        self,
        live: Collection[str],
        mapper: NameMapper,
        packed: Mapping[str, Sequence[str]],
        *,
        wrapper_loads: bool,
        expert_prefix: str = "",
    ) -> None:
        self.live = frozenset(live)
        self.wrapper_loads = wrapper_loads
        self.expert_prefix = expert_prefix
        self.wrapped = frozenset(name.partition(SEGMENT)[0] for name in self.live if SEGMENT in name)
        self._mapper = mapper
        self._owners: dict[str, list[str]] = {}
        for owner, pieces in packed.items():
            for piece in pieces:
                self._owners.setdefault(piece, []).append(owner)
        self._stacks = expert_stacks(self.live)

    @classmethod
    def of(cls, worker: WorkerDescription) -> Namespace:
        """That of a worker's model, as it describes itself."""
        return cls(
            {tensor.name for tensor in worker.live},
            NameMapper.of(worker),
            worker.packed,
            wrapper_loads=worker.rules.wrapper_loads,
            expert_prefix=worker.rules.expert_prefix,
        )

    def reach(self, name: str) -> Landing | None:
        """The live tensor that `name` stands for exactly as it is spelt, or None.

        Its own spelling comes first, then what the mapper makes of it, then each owner of its packed module.
        """
        return next(
            (
                Landing(target, rule, shard)
                for target, rule, shard in self._readings(name)
                if target in self.live
            ),
            None,
        )

    def land(self, name: str) -> Landing | None:
        """The same for a name that travels: also inside a wrapper that takes plain names, and for experts."""
        found = self.reach(name)
        if found is None and SEGMENT not in name and self.wrapper_loads:
            inside = self.reach(with_segment(name))
            if inside is not None:
                rules = [inside.rule] if inside.rule != SAME_NAME else []
                found = Landing(inside.target, ", ".join([*rules, WRAPPED]), inside.shard)
        return found or self._land_expert(name)

    def is_wrapped(self, name: str) -> bool:
        """Whether the module before the segment in `name` has a LoRA wrapper, under any of its readings."""
        return any(
            reading.partition(SEGMENT)[0] in self.wrapped
            for reading, _, _ in self._readings(name)
            if SEGMENT in reading
        )

    def fused_experts(self, name: str) -> bool:
        """Whether `name` is one expert's, in a layer whose experts the engine keeps in stacks."""
        return any(
            expert is not None and expert.holder in self._stacks
            for expert in map(one_expert, self._renamings(name))
        )

    def wrapped_experts(self, name: str) -> bool:
        """Whether `name` is one expert's, or an alias of all of a layer, and those lie in a LoRA wrapper."""
        return any(
            expert is not None and expert.holder in self.wrapped
            for reading in self._renamings(name)
            for expert in (one_expert(reading), fused_alias(reading))
        )

    def _land_expert(self, name: str) -> Landing | None:
        for reading in self._renamings(name):
            expert = one_expert(reading) or fused_alias(reading)
            if expert is None and reading != name and not self.wrapped_experts(name):
                expert = stack_alias(reading)
            target = expert and self._stacks.get(expert.holder, {}).get(expert.stack)
            if expert and target:
                part = f"expert {expert.number}, {expert.shard}" if expert.number else "all experts"
                inside = f", {WRAPPED}" if SEGMENT in target else ""
                return Landing(target, f"{part} of {target.rpartition('.')[2]}{inside}", expert.shard)
        return None

    def _renamings(self, name: str) -> tuple[str, ...]:
        readings = (name, self._mapper.mapped(name), self._mapper.renamed(name), *loader_names(name))
        return tuple(dict.fromkeys(reading for reading in readings if reading))

    def _readings(self, name: str) -> Iterator[tuple[str, str, str]]:
        """What `name` may stand for: name, rule, shard."""
        yield name, SAME_NAME, ""
        mapped = self._mapper.mapped(name)
        if mapped is not None and mapped != name:
            piece, whole = _changed(self._mapper.renamed(name), mapped)
            rule = f"packed into {whole}" if piece else "renamed by its model class"
            yield mapped, rule, piece.removesuffix("_proj")
        parts = name.split(".")
        # Whole components only, and the module alone: `v_proj` is not found inside `qkv_proj`.
        at = len(parts) - (3 if parts[-2:-1] == [BASE] else 2)
        piece = parts[at] if at >= 0 else ""
        for owner in self._owners.get(piece, ()):
            rule, shard = f"packed into {owner}", piece.removesuffix("_proj") if owner != piece else ""
            fused = ".".join([*parts[:at], owner, *parts[at + 1 :]])
            yield fused, rule, shard
            renamed = self._mapper.renamed(fused)
            if renamed is not None and renamed != fused:
                yield renamed, f"renamed by its model class, {rule}", shard
        for own in loader_names(name):
            yield own, "renamed by its loader", ""


def _changed(renamed: str | None, mapped: str) -> tuple[str, str]:
    """The component that stacking replaced and what it became; empty where it replaced none."""
    before, after = (renamed or "").split("."), mapped.split(".")
    if len(before) != len(after):
        return "", ""
    return next(((old, new) for old, new in zip(before, after, strict=True) if old != new), ("", ""))
