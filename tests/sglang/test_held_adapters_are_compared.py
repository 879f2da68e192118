"""What our code in a server makes of SGLang's LoRA manager and pool: bound, or what is wrong with it.

The manager, pool and layers are fakes with SGLang's names, shapes and slices at two ranks; live servers show
that SGLang's own look the same.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightlane.base_digest import value_digest
from weightlane.errors import EngineError, VerificationError
from weightlane.peft import ModuleLora, adapter_of_modules, lora_name
from weightlane_sglang.adapter_held import held_adapter
from weightlane_sglang.adapter_proof import _agreed
from weightlane_sglang.loader_messages import AskedModule, ReadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane_sglang.loader_messages import AdapterHeld

LAYER = "model.layers.0"
QKV = {f"{LAYER}.self_attn.{side}_proj": rows for side, rows in (("q", 8), ("k", 4), ("v", 4))}
DOWN = f"{LAYER}.mlp.down_proj"
ROWS = {**QKV, DOWN: 6}
IN = 6
RANK, LARGEST, SLOTS = 2, 4, 3
FUSED = f"{LAYER}.self_attn.qkv_proj"


class FakeLoRAManager:
    """As much of SGLang's as is read; `place` copies an adapter into the pool, as its first request does."""

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int) -> None:
        fused_a = torch.cat([tensors[lora_name(name, "A")] for name in QKV])
        fused_b = torch.cat([tensors[lora_name(name, "B")] for name in QKV])
        held = {lora_name(FUSED, "A"): fused_a, lora_name(FUSED, "B"): fused_b}
        held |= {name: tensors[name] for name in (lora_name(DOWN, "A"), lora_name(DOWN, "B"))}
        self.base_model = torch.nn.Module()
        self.lora_refs = {"id-1": SimpleNamespace(lora_id="id-1", lora_name="default@1")}
        adapter = SimpleNamespace(
            config=SimpleNamespace(r=RANK),
            scaling=2.0,
            layers=[SimpleNamespace(weights=held)],
            embedding_layers={},
        )
        self.loras = {"id-1": adapter}
        pools = {"qkv_proj": (3, IN, 8), "down_proj": (1, IN // 2, 6)}
        self.memory_pool = SimpleNamespace(
            uid_to_buffer_id={},
            A_buffer={
                name: [torch.zeros(SLOTS, LARGEST * c, width)] for name, (c, width, _) in pools.items()
            },
            B_buffer={name: [torch.zeros(SLOTS, rows, LARGEST)] for name, (_, _, rows) in pools.items()},
        )
        a, b = self.memory_pool.A_buffer, self.memory_pool.B_buffer
        q, k, v = (fused_b[start:stop].chunk(2)[rank] for start, stop in ((0, 8), (8, 12), (12, 16)))
        qkv = SimpleNamespace(
            set_lora=True,
            A_buffer_qkv=a["qkv_proj"][0],
            B_buffer_qkv=b["qkv_proj"][0],
            slice_lora_a_weights=lambda given: given,
            slice_lora_b_weights=lambda _: torch.cat([q, k, v]),
        )
        down = SimpleNamespace(
            set_lora=True,
            A_buffer=a["down_proj"][0],
            B_buffer=b["down_proj"][0],
            slice_lora_a_weights=lambda given: given.chunk(2, dim=1)[rank],
            slice_lora_b_weights=lambda given: given,
        )
        self.lora_modules = [{FUSED: qkv, DOWN: down}]
        self.held = held

    def fetch_new_loras(self, uids: set[str]) -> None:
        (uid,) = uids
        self.memory_pool.uid_to_buffer_id[uid] = 1
        for name, layer in self.lora_modules[0].items():
            leaf = name.rpartition(".")[2]
            a = layer.slice_lora_a_weights(self.held[lora_name(name, "A")])
            b = layer.slice_lora_b_weights(self.held[lora_name(name, "B")])
            self.memory_pool.A_buffer[leaf][0][1, : len(a)] = a
            self.memory_pool.B_buffer[leaf][0][1, :, :RANK] = b


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for name, rows in ROWS.items():
        made[lora_name(name, "A")] = torch.randn(RANK, IN, generator=generator)
        made[lora_name(name, "B")] = torch.randn(rows, RANK, generator=generator)
    return made


@pytest.fixture(params=["model_runner", "get_model_runner"], ids=["tp-worker", "weight-updater"])
def caller(request: pytest.FixtureRequest) -> str:
    """Which of SGLang's objects on the way to our loader leads to the manager, by its attribute."""
    return str(request.param)


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def manager(request: pytest.FixtureRequest, tensors: dict[str, torch.Tensor]) -> FakeLoRAManager:
    return FakeLoRAManager(tensors, request.param)


class FakeCaller:
    """Whoever calls our loader in SGLang, through frames of its own."""

    def __init__(self, manager: Any, leads_by: str = "model_runner") -> None:
        runner = SimpleNamespace(lora_manager=manager)
        setattr(self, leads_by, runner if leads_by == "model_runner" else lambda: runner)

    def update_weights_from_tensor(self, model: torch.nn.Module, asked: ReadAdapter) -> AdapterHeld:
        gc.freeze()  # as SGLang does once it is warm
        try:
            return held_adapter(model, asked)
        finally:
            gc.unfreeze()


def question(tensors: dict[str, torch.Tensor], name: str = "default@1") -> ReadAdapter:
    asked = [
        AskedModule(
            module,
            rows,
            value_digest(tensors[lora_name(module, "A")]),
            value_digest(tensors[lora_name(module, "B")]),
        )
        for module, rows in ROWS.items()
    ]
    return ReadAdapter(name, tuple(asked))


def held(manager: Any, tensors: dict[str, torch.Tensor]) -> AdapterHeld:
    return FakeCaller(manager).update_weights_from_tensor(manager.base_model, question(tensors))


def test_an_adapter_in_the_pool_as_it_was_sent_is_bound_to_every_module(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor], caller: str
) -> None:
    found = FakeCaller(manager, caller).update_weights_from_tensor(manager.base_model, question(tensors))
    assert (found.rank, found.scaling, found.problems, found.others) == (RANK, 2.0, (), ())
    assert set(found.bound) == set(ROWS)
    assert held(manager, tensors) == found, "also where it is in the pool already"


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "down_proj"])
@pytest.mark.parametrize("side", ["A", "B"])
def test_other_values_on_the_host_are_told_by_module(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor], part: str, side: Any
) -> None:
    module = next(name for name in ROWS if name.endswith(part))
    tensors[lora_name(module, side)] = tensors[lora_name(module, side)] * 1.001
    found = held(manager, tensors)
    assert found.problems == (f"SGLang keeps other values of lora_{side} of {module}",)
    assert module not in found.bound


def test_a_pool_that_holds_something_else_is_told(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor]
) -> None:
    manager.fetch_new_loras({"id-1"})
    manager.memory_pool.B_buffer["qkv_proj"][0][1, 5, 1] += 1e-3
    found = held(manager, tensors)
    assert found.problems == (f"SGLang's pool holds other values of lora_B of {FUSED}",)
    assert found.bound == (DOWN,)


def test_layers_of_older_servers_are_told_the_rank_that_their_pool_has(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor]
) -> None:
    manager.fetch_new_loras({"id-1"})
    manager.memory_pool.tp_rank = 5

    def told(cut: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, int], torch.Tensor]:
        def slice_weights(given: torch.Tensor, tp_rank: int) -> torch.Tensor:
            assert tp_rank == 5
            return cut(given)

        return slice_weights

    for layer in manager.lora_modules[0].values():
        layer.slice_lora_a_weights = told(layer.slice_lora_a_weights)
        layer.slice_lora_b_weights = told(layer.slice_lora_b_weights)
    found = held(manager, tensors)
    assert found.problems == ()
    assert set(found.bound) == set(ROWS)
    manager.memory_pool.B_buffer["qkv_proj"][0][1, 5, 1] += 1e-3
    assert held(manager, tensors).bound == (DOWN,)


def test_a_layer_that_reads_another_pool_or_is_none_is_told(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor]
) -> None:
    manager.lora_modules[0][FUSED].A_buffer_qkv = torch.zeros(SLOTS, LARGEST * 3, IN)
    assert held(manager, tensors).problems == (f"SGLang's layer {FUSED} does not read its LoRA pool",)
    del manager.lora_modules[0][DOWN]
    assert f"SGLang has no layer with LoRA for {DOWN}" in held(manager, tensors).problems


def test_names_that_were_dropped_and_names_that_nobody_sent_are_told(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor]
) -> None:
    other = lora_name(f"{LAYER}.mlp.up_proj", "A")
    manager.held[other] = manager.held.pop(lora_name(DOWN, "A"))
    manager.fetch_new_loras = lambda _: manager.memory_pool.uid_to_buffer_id.update({"id-1": 1})  # type: ignore[method-assign]
    found = held(manager, tensors)
    assert f"SGLang keeps nothing for {DOWN}" in found.problems
    assert other in found.others


def test_no_adapter_of_the_name_is_an_error_that_lists_those_there(
    manager: FakeLoRAManager, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(EngineError, match="holds default@1"):
        FakeCaller(manager).update_weights_from_tensor(manager.base_model, question(tensors, "default@2"))


def test_a_model_without_lora_is_an_error(manager: FakeLoRAManager, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(EngineError, match="no LoRA manager"):
        FakeCaller(manager).update_weights_from_tensor(torch.nn.Module(), question(tensors))
    with pytest.raises(EngineError, match="no LoRA manager"):
        FakeCaller(None).update_weights_from_tensor(manager.base_model, question(tensors))


class TestRanksTogether:
    """What the controller makes of the answers of all ranks."""

    CONFIG = adapter_of_modules("default", dict.fromkeys(ROWS, ModuleLora(RANK, 4.0)))

    def load(self) -> Any:
        from weightlane.adapter_engine import AdapterLoad
        from weightlane.adapters import AdapterRef

        return AdapterLoad("default.0", AdapterRef("default@1", 1), self.CONFIG, "{}", {})

    def answer(self, **changes: Any) -> Any:
        from weightlane_sglang.loader_messages import AdapterHeld

        return AdapterHeld(**{"rank": RANK, "scaling": 2.0, "bound": tuple(ROWS), **changes})

    def test_a_module_counts_that_every_rank_has_bound(self) -> None:
        answers = (self.answer(), self.answer(bound=tuple(QKV)))
        binding = _agreed(answers, self.load(), "there")
        assert [item.module for item in binding.modules] == list(QKV)

    @pytest.mark.parametrize(
        "changes", [{"problems": ("x",)}, {"others": ("x",)}, {"rank": 4}, {"scaling": 1.0}]
    )
    def test_one_rank_s_problem_is_everybody_s(self, changes: dict[str, Any]) -> None:
        with pytest.raises(VerificationError):
            _agreed((self.answer(), self.answer(**changes)), self.load(), "there")
