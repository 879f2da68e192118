"""What an adapter is: its modules, each with rank and scale, and the features that an engine must carry."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from weightlane.peft.names import WRAPPER_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping


class ModuleLora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One module's LoRA: it adds `scaling * (B @ A)` to its weight.

    `alpha` is the one of plain LoRA, such that `alpha / rank` is the scale. `experts` counts the pairs that
    are stacked in one pair of matrices, for parameters that hold a stack of experts (`target_parameters`).
    """

    rank: int
    alpha: float
    experts: int = 1

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied with."""
        return self.alpha / self.rank


class AdapterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One LoRA adapter: each target module adds `scaling * (B @ A)` to its weight.

    `alpha` is the one of plain LoRA, such that `alpha / rank` is the scale: rank-stabilised LoRA is folded
    into it, so that an engine that ignores `use_rslora` (SGLang does) scales rightly too. `target_modules`
    are the modules that tensors exist for, by checkpoint name without a wrapper's prefix, in export order:
    never a pattern and never a keyword such as `all-linear`.

    `rank` is the largest rank of any module and `alpha` that of the first module with it; `own` holds the
    modules that differ from these two. `features` are peft's keys of whatever else the adapter asks of an
    engine, each with its value in words (`weightlane.peft.features` says what each means).
    """

    name: str
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    own: dict[str, ModuleLora] = {}
    features: dict[str, str] = {}

    @property
    def scaling(self) -> float:
        """What the product of the matrices is multiplied with, in modules without a scale of their own."""
        return self.alpha / self.rank

    def lora_of(self, module: str) -> ModuleLora:
        """Rank and alpha of one target module."""
        return self.own.get(module) or ModuleLora(self.rank, self.alpha)

    def lora_at(self, path: str) -> ModuleLora:
        """Rank and alpha of the module at a path in a trainer's model, whatever wrappers are around it."""
        _, wrapped, module = path.partition(WRAPPER_PREFIX)
        return self.lora_of(module if wrapped else path)

    @property
    def modules(self) -> dict[str, ModuleLora]:
        """Every target module with its rank and alpha, in export order."""
        return {module: self.lora_of(module) for module in self.target_modules}

    @property
    def needs(self) -> dict[str, str]:
        """By peft's key, what an engine must carry to take this adapter as it is, each in words."""
        found = dict(self.features)
        ranks = sorted({lora.rank for lora in self.modules.values()})
        if len(ranks) > 1:
            found["rank_pattern"] = f"ranks {_listed(ranks)}"
        alphas = sorted({lora.alpha for lora in self.modules.values()})
        if len(alphas) > 1:
            found["alpha_pattern"] = f"alphas {_listed(alphas)}"
        return found


def adapter_of_modules(
    name: str, modules: Mapping[str, ModuleLora], features: Mapping[str, str] | None = None
) -> AdapterConfig:
    """The one `AdapterConfig` of these modules, in their order; equal ones give equal configurations."""
    rank = max((lora.rank for lora in modules.values()), default=0)
    alpha = next((lora.alpha for lora in modules.values() if lora.rank == rank), 0.0)
    usual = ModuleLora(rank, alpha)
    return AdapterConfig(
        name,
        rank,
        alpha,
        tuple(modules),
        own={module: lora for module, lora in modules.items() if lora != usual},
        features=dict(features or {}),
    )


def peft_json(config: AdapterConfig) -> str:
    """The configuration as JSON with peft's own keys, for engines that read those.

    Modules of their own rank or alpha become `rank_pattern` and `alpha_pattern`, anchored, so that each
    pattern means one module under peft's rule. An engine that ignores those keys is given the normal form
    (`weightlane.peft.normal_form`), which has none.
    """
    fields: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(config.target_modules),
    }
    ranks = {_only(name): lora.rank for name, lora in config.own.items() if lora.rank != config.rank}
    alphas = {_only(name): lora.alpha for name, lora in config.own.items() if lora.alpha != config.alpha}
    if ranks:
        fields["rank_pattern"] = ranks
    if alphas:
        fields["alpha_pattern"] = alphas
    return msgspec.json.encode(fields).decode()


def _only(module: str) -> str:
    return f"^{re.escape(module)}"


def _listed(values: list[int] | list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
