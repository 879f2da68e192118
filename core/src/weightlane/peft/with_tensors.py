"""From what a configuration says and the tensors that are really there to the one `AdapterConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PlanError, Problem
from weightlane.peft.config import AdapterConfig, ModuleLora, adapter_of_modules
from weightlane.peft.declared import LoraDeclaration, read_declaration
from weightlane.peft.features import MERGED, explains, refused_features
from weightlane.peft.names import parse_lora_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.manifest import TensorSpec


def adapter_config_of(
    config: object,
    *,
    name: str,
    tensors: Sequence[TensorSpec],
    paths: Mapping[str, str] | None = None,
) -> AdapterConfig:
    """The frozen form of a LoRA configuration and the tensors that belong to it.

    Features that an engine may or may not carry (DoRA, say) are kept in it; planning refuses those that the
    engine at hand does not carry.

    Args:
        config: whatever `declared_lora` reads.
        name: the adapter's name.
        tensors: what is exported, under canonical names.
        paths: where a module is called otherwise in the trainer's model: its name there, which peft's
            patterns match, by canonical name.

    Raises:
        PlanError: everything wrong with the configuration, every tensor that is no matrix of this adapter or
            has another rank than is declared; and then also every feature that a plain adapter has not.
    """
    declaration, problems = read_declaration(config)
    modules, tensor_problems = _modules_of(declaration, tensors, paths or {})
    problems += tensor_problems
    told = {key: repr(value) for key, value in declaration.features.items()}
    if problems:
        raise PlanError([*refused_features(told, (), receiver="a plain adapter"), *problems])
    return adapter_of_modules(name, modules, told)


def _modules_of(
    declaration: LoraDeclaration, tensors: Sequence[TensorSpec], paths: Mapping[str, str]
) -> tuple[dict[str, ModuleLora], list[Problem]]:
    """The modules that both matrices exist for; whatever is no such matrix is a problem."""
    problems: list[Problem] = []
    pairs: dict[str, dict[str, TensorSpec]] = {}
    for spec in tensors:
        parsed = parse_lora_name(spec.name)
        if parsed is not None:
            pairs.setdefault(parsed.module, {})[parsed.side] = spec
        elif not explains(declaration.features, spec.name):
            what = "it belongs to the adapter and is no matrix of a linear module"
            problems.append(Problem("adapter-tensor", spec.name, what, MERGED))
    modules: dict[str, ModuleLora] = {}
    for module, pair in pairs.items():
        if len(pair) == 1:
            missing = ({"A", "B"} - set(pair)).pop()
            problems.append(Problem("adapter-tensor", module, f"it has no lora_{missing} matrix"))
            problems += _rank_problems(declaration, pair, declaration.loras_of(paths.get(module, module)))
            continue
        lora = _lora_of(declaration, module, pair, paths, problems)
        if lora is not None:
            modules[module] = lora
    if not pairs and not problems:
        problems.append(Problem("adapter-tensor", "adapter", "it has no tensors, so nothing could be bound"))
    return modules, problems


def _lora_of(
    declaration: LoraDeclaration,
    module: str,
    pair: Mapping[str, TensorSpec],
    paths: Mapping[str, str],
    problems: list[Problem],
) -> ModuleLora | None:
    possible = declaration.loras_of(paths.get(module, module))
    inner = _inner(pair["A"], "A")
    if declaration.ranks_by_tensor and inner:
        possible = (declaration.lora(inner, declaration.alpha),)
    wrong = _rank_problems(declaration, pair, possible)
    if wrong:
        problems += wrong
        return None
    fitting = [lora for lora in possible if _experts(declaration, pair["A"], "A", lora.rank)]
    if not fitting:
        return None  # told already: the configuration has no rank
    if len(fitting) > 1:
        what = (
            "releases of peft read its patterns otherwise: "
            + " or ".join(f"alpha {lora.alpha:g} at rank {lora.rank}" for lora in fitting)
            + ", and the configuration has no peft_version"
        )
        problems.append(Problem("peft-config", module, what, "Record the release in peft_version."))
        return None
    lora = fitting[0]
    experts = _experts(declaration, pair["A"], "A", lora.rank)
    return ModuleLora(lora.rank, lora.alpha, experts)


def _rank_problems(
    declaration: LoraDeclaration, pair: Mapping[str, TensorSpec], possible: Sequence[ModuleLora]
) -> list[Problem]:
    ranks = sorted({lora.rank for lora in possible})
    if ranks == [0]:
        return []  # told already: the configuration's own rank is none
    told = " or ".join(str(rank) for rank in ranks)
    problems: list[Problem] = []
    for side, spec in pair.items():
        if not any(_experts(declaration, spec, side, rank) for rank in ranks):
            what = f"its shape is {list(spec.shape)}, and the configuration's rank is {told}"
            problems.append(Problem("adapter-tensor", spec.name, what, MERGED))
    inner = {_inner(spec, side) for side, spec in pair.items()}
    if not problems and len(inner) > 1:
        what = f"its matrices have ranks {', '.join(map(str, sorted(size or 0 for size in inner)))}"
        problems.append(Problem("adapter-tensor", pair["A"].name, what, MERGED))
    return problems


def _inner(spec: TensorSpec, side: str) -> int | None:
    return spec.shape[0 if side == "A" else -1] if len(spec.shape) == 2 else None


def _experts(declaration: LoraDeclaration, spec: TensorSpec, side: str, rank: int) -> int:
    """How many pairs are stacked in a matrix of this rank; 0 where the rank does not fit it."""
    inner = _inner(spec, side)
    if inner == rank:
        return 1
    stacked = "target_parameters" in declaration.features and ".experts" in spec.name
    return inner // rank if stacked and inner and rank and inner % rank == 0 else 0
