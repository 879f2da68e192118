"""The normal form of an adapter: one rank, scale 1, whole groups; the same effect, for any engine.

Some engines read a rank and an alpha and nothing else: SGLang ignores `rank_pattern`, `alpha_pattern` and
`use_rslora` without a word, and takes query, key and value together or not at all. In the normal form nothing
is left to ignore: every pair of matrices has the largest rank, with rows of zeros below A and columns of
zeros beside B; B is multiplied by the module's scale, so that alpha is the rank; modules that a group lacks
are added with zeros.

`B @ A` times the scale stays what it was, exactly but for the multiplication of B, which is rounded to B's
dtype: by at most 2**-8 of each element in bfloat16, 2**-11 in float16, 2**-23 in float32, and not at all
where the scale is a power of two.

All of it is worked out from names and shapes; `transform` alone touches values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.errors import ExportError, PlanError, Problem
from weightlane.manifest import TensorSpec
from weightlane.peft.config import AdapterConfig, ModuleLora, adapter_of_modules
from weightlane.peft.features import MERGED
from weightlane.peft.names import lora_name, parse_lora_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorTransform:
    """How one tensor of the normal form is made.

    `source` is the name of the trainer's tensor, "" for zeros of `shape`; `side` says along which axis it is
    padded up to `shape` ("" for a tensor that is passed on), and `factor` is what it is multiplied with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: str
    side: Literal["A", "B", ""] = ""
    factor: float = 1.0


def normal_form(
    config: AdapterConfig,
    tensors: Sequence[TensorSpec],
    *,
    groups: Sequence[Sequence[str]] = (),
    weights: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[AdapterConfig, tuple[TensorSpec, ...]]:
    """Configuration and tensors of the normal form, in the order of the given ones.

    Args:
        config: the adapter as it was trained.
        tensors: its tensors, under canonical names.
        groups: leaf names of modules that the engine takes together or not at all.
        weights: full shapes (out, in) of the weights of the receiver's checkpoint, by module: a sibling is
            added only where there is one, and has its shape.

    Raises:
        PlanError: a stack of experts would have to be padded, which only its own layout could tell how.
    """
    modules = config.modules
    rank = max((lora.rank for lora in modules.values()), default=0)
    problems = [
        Problem(
            "peft-config",
            module,
            f"its {lora.experts} experts have rank {lora.rank} in one matrix, not to be padded to {rank}",
            MERGED,
        )
        for module, lora in modules.items()
        if lora.experts > 1 and lora.rank != rank
    ]
    if problems:
        raise PlanError(problems)
    normal = {module: ModuleLora(rank, float(rank), lora.experts) for module, lora in modules.items()}
    specs = [_padded(spec, config, rank) for spec in tensors]
    for module, like in _missing(modules, groups, weights or {}).items():
        normal[module] = ModuleLora(rank, float(rank))
        specs += _zeros(module, like, specs, rank, weights or {})
    return adapter_of_modules(config.name, normal, config.features), tuple(specs)


def transforms(
    config: AdapterConfig,
    tensors: Sequence[TensorSpec],
    normal: AdapterConfig,
    specs: Sequence[TensorSpec],
) -> tuple[TensorTransform, ...]:
    """How each of `specs` is made of `tensors`, both with their configurations; `normal_form` gave them."""
    held = {spec.name for spec in tensors}
    made: list[TensorTransform] = []
    for spec in specs:
        parsed = parse_lora_name(spec.name)
        source = spec.name if spec.name in held else ""
        if parsed is None or not source:
            made.append(TensorTransform(spec.name, spec.shape, spec.dtype, source))
            continue
        scale = config.lora_of(parsed.module).scaling / normal.lora_of(parsed.module).scaling
        factor = scale if parsed.side == "B" else 1.0
        made.append(TensorTransform(spec.name, spec.shape, spec.dtype, source, parsed.side, factor))
    return tuple(made)


def transform(change: TensorTransform, source: Tensor | None, *, device: str = "cpu") -> Tensor:
    """One tensor of the normal form. The source is read and never written; unchanged, it is passed on.

    Args:
        change: how it is made.
        source: the trainer's tensor, of any floating dtype, on any device; None for zeros.
        device: where zeros are made.

    Raises:
        ExportError: multiplied by the scale, float16 values overflow.
    """
    import torch
    from torch.nn.functional import pad

    from weightlane.packing import torch_dtype

    if source is None:
        return torch.zeros(change.shape, dtype=torch_dtype(change.dtype), device=device)
    result = source
    if change.factor != 1.0:
        wide = source.to(torch.float32) if source.element_size() < torch.float32.itemsize else source
        result = (wide * change.factor).to(source.dtype)
        if (
            source.dtype == torch.float16
            and not torch.isfinite(result).all()
            and torch.isfinite(source).all()
        ):
            raise ExportError(
                f"{change.name} overflows float16 when its scale {change.factor:g} is folded into it.",
                "The engine takes adapters without a scale of their own.",
                "Train the adapter in bfloat16 or float32, or use mode merged.",
            )
    if tuple(result.shape) == change.shape:
        return result
    if change.side == "A":
        result = pad(result, (0, 0, 0, change.shape[0] - result.shape[0]))
    elif change.side == "B":
        result = pad(result, (0, change.shape[1] - result.shape[1]))
    return result


def _padded(spec: TensorSpec, config: AdapterConfig, rank: int) -> TensorSpec:
    parsed = parse_lora_name(spec.name)
    if parsed is None or len(spec.shape) != 2:
        return spec
    inner = rank * config.lora_of(parsed.module).experts
    shape = (inner, spec.shape[1]) if parsed.side == "A" else (spec.shape[0], inner)
    return TensorSpec(spec.name, shape, spec.dtype, spec.holders)


def _missing(
    modules: Mapping[str, ModuleLora], groups: Sequence[Sequence[str]], weights: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Modules that a group lacks, each with a present one of its group."""
    found: dict[str, str] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        for group in groups:
            if leaf in group:
                siblings = [f"{parent}.{other}" if parent else other for other in group]
                found |= {
                    sibling: module
                    for sibling in siblings
                    if sibling not in modules and sibling not in found and len(weights.get(sibling, ())) == 2
                }
    return found


def _zeros(
    module: str, like: str, specs: Sequence[TensorSpec], rank: int, weights: Mapping[str, tuple[int, ...]]
) -> list[TensorSpec]:
    """The pair of a module that is not trained: zeros, held by whoever holds the module that it is like."""
    out, inputs = weights[module]
    held = next(spec for spec in specs if spec.name == lora_name(like, "A"))
    return [
        TensorSpec(lora_name(module, "A"), (rank, inputs), held.dtype, held.holders),
        TensorSpec(lora_name(module, "B"), (out, rank), held.dtype, held.holders),
    ]
