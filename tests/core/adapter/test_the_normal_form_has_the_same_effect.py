"""One rank, scale 1 and whole groups: what each module adds to its weight stays what it was trained to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.errors import ExportError, PlanError
from weightlane.manifest import TensorSpec
from weightlane.peft import AdapterConfig, ModuleLora, adapter_of_modules, lora_name
from weightlane.peft.normal_form import TensorTransform, normal_form, transform, transforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LEAVES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj")
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
SIZES = {
    "q_proj": (6, 5),
    "k_proj": (2, 5),
    "v_proj": (2, 5),
    "gate_proj": (7, 5),
    "up_proj": (7, 5),
    "o_proj": (5, 6),
}
MODULES = [f"layers.{layer}.{leaf}" for layer in (0, 1) for leaf in LEAVES]
WEIGHTS = {module: SIZES[module.rpartition(".")[2]] for module in MODULES}
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}

loras = st.builds(ModuleLora, st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0, 8.0, 16.0, 22.6, -2.0]))
adapters = st.dictionaries(st.sampled_from(MODULES), loras, min_size=1).map(
    lambda modules: adapter_of_modules("policy", modules)
)


def specs_of(config: AdapterConfig, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            lora_name(module, side),
            (lora.rank, WEIGHTS[module][1]) if side == "A" else (WEIGHTS[module][0], lora.rank),
            dtype,
            (0,),
        )
        for module, lora in config.modules.items()
        for side in ("A", "B")
    )


def values_of(specs: Sequence[TensorSpec], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for spec in specs
    }


def in_normal_form(
    config: AdapterConfig, dtype: str = "float32"
) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, Tensor]]:
    specs = specs_of(config, dtype)
    normal, made = normal_form(config, specs, groups=GROUPS, weights=WEIGHTS)
    held = values_of(specs)
    before = {name: tensor.clone() for name, tensor in held.items()}
    sent = {
        change.name: transform(change, held[change.source] if change.source else None)
        for change in transforms(config, specs, normal, made)
    }
    assert [(spec.name, spec.shape) for spec in made] == [
        (name, tuple(item.shape)) for name, item in sent.items()
    ]
    assert {item.dtype for item in sent.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
    return normal, held, sent


def effect(config: AdapterConfig, tensors: dict[str, Tensor], module: str) -> Tensor:
    """What an adapter adds to a module's weight, in double precision; nothing where it has no matrices."""
    if module not in config.modules:
        return torch.zeros(WEIGHTS[module], dtype=torch.float64)
    first, second = (tensors[lora_name(module, side)].double() for side in ("A", "B"))
    return (second @ first) * config.lora_of(module).scaling


@settings(max_examples=20, deadline=None)
@given(adapters)
def test_every_module_adds_what_it_added(config: AdapterConfig) -> None:
    normal, held, sent = in_normal_form(config)
    assert normal.own == {}
    assert normal.needs == {}
    assert normal.alpha == normal.rank == config.rank
    assert normal.scaling == 1.0
    for module in MODULES:
        wanted, got = effect(config, held, module), effect(normal, sent, module)
        assert torch.allclose(got, wanted, rtol=0, atol=1e-6 * max(1.0, float(wanted.abs().max())))
    for group in GROUPS:
        for layer in (0, 1):
            inside = [f"layers.{layer}.{leaf}" in normal.modules for leaf in group]
            assert all(inside) or not any(inside)
    added = set(normal.modules) - set(config.modules)
    assert all(not sent[lora_name(module, side)].any() for module in added for side in ("A", "B"))


@settings(max_examples=10, deadline=None)
@given(adapters, st.sampled_from(["bfloat16", "float16"]))
def test_short_dtypes_lose_one_rounding_of_b_and_nothing_at_powers_of_two(
    config: AdapterConfig, dtype: str
) -> None:
    _, held, sent = in_normal_form(config, dtype)
    for module, lora in config.modules.items():
        rank, name = lora.rank, lora_name(module, "B")
        exact = held[name].double() * lora.scaling
        folded = sent[name][:, :rank].double()
        room = (
            ROUNDING[getattr(torch, dtype)] * exact.abs() + 2.0**-24
        )  # the last is where float16 is subnormal
        assert ((folded - exact).abs() <= room).all()
        if abs(lora.scaling) in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0) and dtype == "bfloat16":
            assert torch.equal(folded, exact)
        assert not sent[name][:, rank:].any()
        first = lora_name(module, "A")
        assert torch.equal(sent[first][:rank], held[first])
        assert not sent[first][rank:].any()


def test_control_a_scale_that_is_not_folded_is_seen() -> None:
    """What an engine does that reads one rank and one alpha of an adapter whose modules differ."""
    config = adapter_of_modules("p", {MODULES[0]: ModuleLora(4, 8.0), MODULES[2]: ModuleLora(2, 8.0)})
    held = values_of(specs_of(config))
    ignoring = adapter_of_modules(
        "p", {module: ModuleLora(config.rank, config.alpha) for module in config.modules}
    )
    wrong, right = ignoring.scaling, config.lora_of(MODULES[2]).scaling
    assert (wrong, right) == (2.0, 4.0)
    assert config.needs == {"rank_pattern": "ranks 2, 4"}
    assert not torch.allclose(
        effect(config, held, MODULES[2]) / right * wrong, effect(config, held, MODULES[2])
    )
    normal, held, sent = in_normal_form(config)
    assert torch.allclose(effect(normal, sent, MODULES[2]), effect(config, held, MODULES[2]))


def test_an_adapter_without_groups_or_patterns_keeps_its_tensors() -> None:
    config = adapter_of_modules("p", {"layers.0.o_proj": ModuleLora(4, 4.0)})
    specs = specs_of(config)
    normal, made = normal_form(config, specs, groups=GROUPS, weights=WEIGHTS)
    assert (normal, made) == (config, specs)
    held = values_of(specs)
    for change in transforms(config, specs, normal, made):
        assert transform(change, held[change.name]).data_ptr() == held[change.name].data_ptr()


def test_a_sibling_that_the_receiver_lacks_is_not_made_up() -> None:
    config = adapter_of_modules("p", {"layers.0.q_proj": ModuleLora(2, 2.0)})
    without = {module: shape for module, shape in WEIGHTS.items() if not module.endswith("v_proj")}
    normal, _ = normal_form(config, specs_of(config), groups=GROUPS, weights=without)
    assert list(normal.modules) == ["layers.0.q_proj", "layers.0.k_proj"]


def test_float16_that_would_overflow_is_an_error_that_names_the_tensor() -> None:
    big = torch.full((2, 2), 60000.0, dtype=torch.float16)
    change = TensorTransform("layers.0.q_proj.lora_B.weight", (2, 2), "float16", "b", "B", 2.0)
    with pytest.raises(ExportError, match=r"layers\.0\.q_proj\.lora_B\.weight overflows float16"):
        transform(change, big)
    assert torch.isinf(transform(change, torch.full((2, 2), torch.inf, dtype=torch.float16))).all()


def test_a_stack_of_experts_that_would_have_to_be_padded_is_refused() -> None:
    modules = {"mlp.experts": ModuleLora(2, 4.0, experts=3), "layers.0.o_proj": ModuleLora(4, 4.0)}
    with pytest.raises(PlanError, match=r"mlp\.experts: its 3 experts have rank 2"):
        normal_form(adapter_of_modules("p", modules, {"target_parameters": "['experts']"}), ())
