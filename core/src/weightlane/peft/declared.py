"""What a LoRA configuration says: one frozen form, whatever it was read from."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from weightlane.errors import PlanError, Problem
from weightlane.peft.config import ModuleLora
from weightlane.peft.features import IN_TRAINER, asked_features, unknown_fields
from weightlane.peft.patterns import looked_up, rules_of
from weightlane.peft.plain_values import fields_of


class LoraDeclaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA configuration as it was declared, before anybody has looked at tensors.

    `target_modules` and `exclude_modules` are a tuple of names, a string (a regex, or `all-linear`), or None.
    `alpha` is the declared one, `use_rslora` says what it is divided by. The patterns keep their order, since
    the first that matches holds. `features` are the keys that ask an engine for more, as plain data.
    `peft_version` is the recorded release, "" where none is. Where `ranks_by_tensor`, the matrices say each
    module's rank (Megatron-Bridge divides that of experts by their number).
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    features: dict[str, Any] = {}
    task_type: str = ""
    base_model: str = ""
    peft_version: str = ""
    ranks_by_tensor: bool = False
    source: Literal["peft", "megatron"] = "peft"

    def loras_of(self, module: str) -> tuple[ModuleLora, ...]:
        """Rank and plain alpha of a module, by its name in the trainer's model.

        More than one where the rules of peft's releases differ for it and no release is recorded.
        """
        found: dict[ModuleLora, None] = {}
        for rule in rules_of(self.peft_version):
            rank, alpha = looked_up(rule, self.rank_pattern, self.alpha_pattern, module)
            found[self.lora(self.rank if rank is None else rank, self.alpha if alpha is None else alpha)] = (
                None
            )
        return tuple(found)

    def lora(self, rank: int, alpha: float) -> ModuleLora:
        """A declared rank and alpha as plain LoRA's: rank-stabilised scaling is folded into alpha."""
        return ModuleLora(rank, float(alpha * math.sqrt(rank) if self.use_rslora else alpha))


def declared_lora(config: object) -> LoraDeclaration:
    """The frozen form of a LoRA configuration.

    Args:
        config: a peft configuration object, a mapping with its keys (its `to_dict`, `adapter_config.json`), a
            LoRA block of Megatron-Bridge (`dim`, `alpha`) or one of verl (`rank`, `alpha`), as an object or a
            mapping.

    Raises:
        PlanError: it is none of these, a value is of the wrong kind, or a key is unknown; all at once.
    """
    declaration, problems = read_declaration(config)
    if problems:
        raise PlanError(problems)
    return declaration


def read_declaration(config: object) -> tuple[LoraDeclaration, list[Problem]]:
    """As `declared_lora`, but problems are given back beside as much as could be read."""
    from weightlane.peft.megatron import is_megatron_block, read_megatron_block

    if isinstance(config, LoraDeclaration):
        return config, []
    try:
        fields = fields_of(config)
    except TypeError:
        what = f"a {type(config).__name__} is neither a configuration object nor a mapping"
        return LoraDeclaration(0, 0.0), [Problem("peft-config", "configuration", what)]
    if is_megatron_block(fields):
        return read_megatron_block(fields, type(config).__name__)
    return _read_peft(fields, _version_of_library(config))


def _read_peft(fields: Mapping[str, Any], library: str) -> tuple[LoraDeclaration, list[Problem]]:
    problems = [*_type_problems(fields), *unknown_fields(fields)]
    reader = FieldReader(fields, problems)
    declaration = LoraDeclaration(
        rank=reader.rank("r"),
        alpha=reader.number("lora_alpha"),
        use_rslora=bool(fields.get("use_rslora")),
        target_modules=reader.names("target_modules"),
        exclude_modules=reader.names("exclude_modules"),
        layers_to_transform=reader.layers("layers_to_transform"),
        layers_pattern=reader.words("layers_pattern"),
        rank_pattern={key: int(value) for key, value in reader.pattern("rank_pattern", whole=True).items()},
        alpha_pattern=reader.pattern("alpha_pattern", whole=False),
        features=asked_features(fields),
        task_type=str(fields.get("task_type") or ""),
        base_model=str(fields.get("base_model_name_or_path") or ""),
        peft_version=str(fields.get("peft_version") or library),
    )
    return declaration, problems


def _version_of_library(config: object) -> str:
    """The release of the peft that an object came from; releases before 0.19 do not record it themselves."""
    if isinstance(config, Mapping) or type(config).__module__.partition(".")[0] != "peft":
        return ""
    return str(getattr(sys.modules.get("peft"), "__version__", ""))


def _type_problems(fields: Mapping[str, Any]) -> list[Problem]:
    kind = fields.get("peft_type")
    if kind == "LORA":
        return []
    if kind is None:
        what = f"the configuration has no peft_type; it has {', '.join(sorted(fields)) or 'no keys'}"
        return [Problem("peft-config", "peft_type", what, "Give the configuration that peft made.")]
    return [Problem("peft-config", "peft_type", f"{kind} adapters cannot be carried; LORA can", IN_TRAINER)]


class FieldReader:
    """Reads fields of a configuration by kind; what is of another kind becomes a problem and a null value.

    Args:
        fields: plain values by key.
        problems: where problems are added.
    """

    def __init__(self, fields: Mapping[str, Any], problems: list[Problem]) -> None:
        self._fields = fields
        self._problems = problems

    def rank(self, key: str) -> int:
        """A whole number above 0."""
        value = self._fields.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._wrong(key, f"the rank is {value!r}, not a whole number above 0")
        return 0

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._fields.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        self._wrong(key, f"it is {value!r}, not a number")
        return 0.0

    def names(self, key: str) -> tuple[str, ...] | str | None:
        """Names, or one string, which is kept whole; an unreadable regex is a problem.

        Names are sorted: peft makes sets of them, and writes those to a file in any order.
        """
        value = self._fields.get(key)
        if isinstance(value, str):
            return value if value and self._is_regex(key, value) else None
        return None if value is None else tuple(sorted(self._strings(key, value)))

    def words(self, key: str) -> tuple[str, ...]:
        """Strings; one alone stands for a list of itself."""
        value = self._fields.get(key)
        if isinstance(value, str):
            return (value,) if value else ()
        return () if value is None else self._strings(key, value)

    def layers(self, key: str) -> tuple[int, ...]:
        """Numbers of layers; one alone stands for a list of itself."""
        value = self._fields.get(key)
        numbers = [] if value is None else value if isinstance(value, list) else [value]
        if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return tuple(numbers)
        self._wrong(key, f"it is {value!r}, not numbers of layers")
        return ()

    def pattern(self, key: str, *, whole: bool) -> dict[str, Any]:
        """Numbers by pattern, in order; `whole`: ranks, which are whole and above 0."""
        value = self._fields.get(key) or {}
        if not isinstance(value, Mapping):
            self._wrong(key, f"it is {value!r}, not a mapping of patterns")
            return {}
        found: dict[str, Any] = {}
        for pattern, number in value.items():
            right = isinstance(number, int) and number > 0 if whole else isinstance(number, int | float)
            if not right or isinstance(number, bool) or not math.isfinite(number):
                self._wrong(key, f"{pattern} has {number!r}, not a {'rank' if whole else 'number'}")
            elif self._is_regex(key, str(pattern)):
                found[str(pattern)] = number if whole else float(number)
        return found

    def _strings(self, key: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._wrong(key, f"it is {value!r}, not names of modules")
        return ()

    def _is_regex(self, key: str, value: str) -> bool:
        try:
            re.compile(value)
        except re.error as error:
            self._wrong(key, f"{value!r} is no regular expression ({error})")
            return False
        return True

    def _wrong(self, key: str, what: str) -> None:
        self._problems.append(Problem("peft-config", key, what))
