"""Loads adapters and weights into workers without an engine and writes what was seen, as JSON.

python adapters_in_workers.py MODEL ANSWER
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
from buffers_in_workers import observe_buffers
from lora_workers import EVERY, adapter, load_of, worker_of_rank
from reload_in_workers import observe_reloads

from weightlane.adapter_check import binding_problems
from weightlane.adapters import AdapterExpression, AdapterPlan, TrainedBase
from weightlane.facts import EngineFacts
from weightlane.peft import ModuleLora, adapter_of_modules, lora_name
from weightlane_vllm.adapter_refusals import adapter_problems
from weightlane_vllm.adapter_shelf import shelf_of
from weightlane_vllm.lora_binding import binding_of
from weightlane_vllm.lora_layers import LoraLayers
from weightlane_vllm.lora_request import lora_number, lora_request

WHOLE = "model.layers.0.self_attn.q_proj"


def problems(load: Any, binding: Any) -> list[str]:
    return binding_problems(load.config, load.ref, binding)


def raised(function: Any, *given: Any) -> str:
    try:
        function(*given)
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def loads_and_swaps(worker: Any, seen: dict[str, Any]) -> None:
    shelf = shelf_of(worker)
    first, second = load_of("default.0", adapter(seed=1)), load_of("default.1", adapter(version=2, seed=2))
    kept = {name: tensor.clone() for name, tensor in first.tensors.items()}
    seen["first"] = problems(first, shelf.load(first))
    seen["adds"] = worker.added
    seen["tensors_untouched"] = all(torch.equal(first.tensors[name], kept[name]) for name in kept)
    shelf.serve(first.slot)
    seen["second"] = problems(second, shelf.load(second))
    seen["served_meanwhile"] = [ref.name for ref in shelf.serving()]
    seen["full"] = raised(shelf.load, load_of("other.0", adapter("other")))
    shelf.serve(second.slot)
    shelf.remove(first.slot)
    seen["served_after"] = [ref.name for ref in shelf.serving()]
    seen["listed_after"] = worker.list_loras() == {lora_number("default@2")}


def dropped_ones_come_back(worker: Any, seen: dict[str, Any]) -> None:
    shelf = shelf_of(worker)
    runner = worker.model_runner
    # What vLLM's own weight transfer ends with since 0.28.
    drop = getattr(runner, "reset_lora_state", runner.lora_manager.remove_all_adapters)
    drop()
    seen["dropped"] = not worker.list_loras()
    # A request of somebody who never asked us: vLLM loads what it names by itself.
    runner.add_lora(lora_request(adapter(version=2)[0]))
    seen["back_by_request"] = worker.list_loras() == {lora_number("default@2")}
    drop()
    seen["served_again"] = [ref.name for ref in shelf.serving()]
    seen["back_by_asking"] = worker.list_loras() == {lora_number("default@2")}
    seen["unknown"] = raised(worker.add_lora, lora_request(adapter("nobody")[0]))


def failures_leave_nothing(worker: Any, seen: dict[str, Any]) -> None:
    shelf = shelf_of(worker)
    layers = LoraLayers(worker)
    made = load_of("default.0", adapter(version=3, seed=3))
    layer = layers.sites()["model.layers.1.mlp.down_proj"].layer
    honest = layer.set_lora

    def fails(*given: Any) -> None:
        raise RuntimeError("in the middle")

    layer.set_lora = fails
    seen["failed"] = raised(shelf.load, made)
    layer.set_lora = honest
    seen["listed_after_failure"] = worker.list_loras() == {lora_number("default@2")}
    seen["still_served"] = [ref.name for ref in shelf.serving()]
    seen["again"] = problems(made, shelf.load(made))
    shelf.remove(made.slot)


def wrong_ones_are_told(worker: Any, seen: dict[str, Any]) -> None:
    """Undoes one rule at a time and lets the proof say what the layers then hold."""
    shelf = shelf_of(worker)
    layers = LoraLayers(worker)
    made = load_of("default.0", adapter(version=4, seed=4))
    half = replace(made, tensors=dict(list(made.tensors.items())[: len(made.tensors) // 2]))
    seen["half"] = problems(half, shelf.load(half))
    shelf.load(made)
    index = layers.index_of(lora_number("default@4"))
    for site in layers.sites().values():
        site.held(index)[1].mul_(2.0)  # what a tensor that vLLM was lent does to the next push
    seen["folded_twice"] = problems(made, binding_of(layers, made, lora_number("default@4")))
    shelf.load(made)
    layers.sites()[layers.receiver_name(WHOLE)].held(index)[0].zero_()
    seen["one_unbound"] = problems(made, binding_of(layers, made, lora_number("default@4")))
    worker.remove_lora(lora_number("default@4"))
    seen["none_bound"] = problems(made, binding_of(layers, made, lora_number("default@4")))
    shelf.remove(made.slot)
    part = load_of("default.0", adapter(version=5, modules={WHOLE: ModuleLora(4, 8.0)}))
    shelf.load(part)
    index = layers.index_of(lora_number("default@5"))
    layers.sites()["model.layers.0.mlp.up_proj"].held(index)[1].add_(1.0)
    seen["one_more"] = problems(part, binding_of(layers, part, lora_number("default@5")))
    shelf.remove(part.slot)
    seen["lent"] = lent_twice(worker, {name: tensor.clone() for name, tensor in part.tensors.items()})


def lent_twice(worker: Any, shared: dict[str, torch.Tensor]) -> list[float]:
    """Norms of one `lora_b` at first and after each load: lent, it is multiplied by the scale each time."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    name = lora_name(WHOLE, "B")
    norms = [float(shared[name].norm())]
    for _ in range(2):
        helper = PEFTHelper(r=4, lora_alpha=8, target_modules=["q_proj"])
        model = LoRAModel.from_lora_tensors(
            lora_model_id=7, tensors=shared, peft_helper=helper, device="cpu", dtype=torch.float32
        )
        manager._adapter_manager.add_adapter(model)
        manager.remove_adapter(7)
        norms.append(float(shared[name].norm()))
    return norms


def modules_without_a_layer(worker: Any, seen: dict[str, Any]) -> None:
    """A fused module, one of a layer that is not there, and one of a class that LoRA is not taken for."""
    named = ("self_attn.qkv_proj", "self_attn.q_norm", "self_attn.q_proj")
    modules = dict.fromkeys((f"model.layers.0.{name}" for name in named), ModuleLora(16, 8.0))
    modules["model.layers.7.mlp.up_proj"] = ModuleLora(16, 8.0)
    config = adapter_of_modules("default", modules)
    plan = AdapterPlan(config, AdapterExpression("two_slot", "{}"), TrainedBase("b", not_sent="it stays"))
    lora = worker.vllm_config.lora_config
    launched = {"enable_lora": "true", "max_lora_rank": str(lora.max_lora_rank)}
    facts = EngineFacts("vllm", "0", "worker", launch_arguments=launched)
    found = adapter_problems(worker, plan, facts, receiver="worker 0")
    seen["refused"] = [problem.subject for problem in found]
    off = msgspec.structs.replace(facts, launch_arguments={"enable_lora": "false"})
    seen["lora_off"] = [item.subject for item in adapter_problems(worker, plan, off, receiver="worker 0")]


def a_version_is_published_again(worker: Any, seen: dict[str, Any]) -> None:
    """By a trainer that began anew, with other values: one name and one number, which changes hands."""
    shelf = shelf_of(worker)
    layers, number = LoraLayers(worker), lora_number("again@1")
    first, second = (load_of(f"again.{seed}", adapter("again", seed=seed)) for seed in (0, 1))
    shelf.remove("default.1")
    shelf.load(first)
    shelf.serve(first.slot)
    seen["beside"] = problems(second, shelf.load(second))
    seen["first_still"] = problems(first, binding_of(layers, first, number))
    shelf.serve(second.slot)
    shelf.remove(first.slot)
    seen["second_now"] = problems(second, binding_of(layers, second, number))
    seen["one_name"] = [ref.name for ref in shelf.serving()]
    seen["one_number"] = worker.list_loras() == {number}
    shelf.remove(second.slot)
    seen["none_left"] = not worker.list_loras()


def an_old_one_is_kept_until_it_is_released(worker: Any, seen: dict[str, Any]) -> None:
    """As an engine needs it whose requests run on: what they name must stay."""
    shelf = shelf_of(worker)
    shelf.removals = "when-released"
    first, second, third = (
        load_of(f"kept.{slot}", adapter("kept", version=version, seed=version))
        for slot, version in ((0, 1), (1, 2), (0, 3))
    )
    for made, old in ((first, None), (second, first)):
        shelf.load(made)
        shelf.serve(made.slot)
        if old:
            shelf.remove(old.slot)
    told = shelf.told()
    seen["kept"] = [[ref.name for ref in refs] for refs in (told.adapters, told.loaded, told.kept)]
    layers = LoraLayers(worker)
    seen["kept_is_whole"] = problems(first, binding_of(layers, first, lora_number("kept@1")))
    seen["slot_is_needed"] = raised(shelf.load, third)
    shelf.release(["kept@1", "kept@2"])
    seen["released"] = worker.list_loras() == {lora_number("kept@2")}
    seen["then_loaded"] = problems(third, shelf.load(third))
    seen["loaded"] = [ref.name for ref in shelf.told().loaded]
    shelf.serve(third.slot)
    shelf.remove(second.slot)
    shelf.remove(third.slot)  # what a base does that is written under them
    seen["none_kept"] = not worker.list_loras()
    shelf.removals = "at-once"


def layers_add_what_the_formula_adds(worker: Any, rank: int, workers: int, seen: dict[str, Any]) -> None:
    """Through vLLM's own mapping and kernels; of layers whose outputs are sharded, so that a rank has rows.

    At tensor parallel 1 that is every layer. The shards are cut here by hand, not by vLLM's own slicing.
    """
    shelf = shelf_of(worker)
    made = load_of("default.0", adapter(version=8, seed=8))
    shelf.load(made)
    number, layers = lora_number(made.ref.name), LoraLayers(worker)
    worker.model_runner._set_active_loras((number,), (number,) * 3, {lora_request(made.ref)})
    worst, largest, compared = 0.0, 0.0, 0
    for module in made.config.target_modules:
        if workers > 1 and module.endswith(("o_proj", "down_proj")):
            continue  # their inputs are sharded, and the sum over ranks needs all of them
        site = layers.sites()[layers.receiver_name(module)]
        first, second = made.tensors[lora_name(module, "A")], made.tensors[lora_name(module, "B")]
        inputs = torch.randn(3, first.shape[1], generator=torch.Generator().manual_seed(compared))
        layer, part = site.layer, site.piece or 0
        output = torch.zeros(3, sum(layer.output_slices))
        layer.punica_wrapper.add_lora_linear(
            output, inputs, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices
        )
        added = output.split(list(layer.output_slices), 1)[part]
        wanted = 2.0 * (inputs @ first.T @ second.chunk(workers)[rank].T)
        worst = max(worst, float((added - wanted).abs().max()))
        largest, compared = max(largest, float(wanted.abs().max())), compared + 1
    seen["formula"] = {"off": worst / largest, "compared": compared}
    shelf.remove(made.slot)


def own_ranks(worker: Any, seen: dict[str, Any]) -> None:
    shelf = shelf_of(worker)
    modules = {name: ModuleLora(4, 8.0) for name in EVERY}
    modules[WHOLE] = ModuleLora(2, 12.0)
    made = load_of("default.0", adapter(version=6, modules=modules, seed=6))
    seen["own_ranks"] = problems(made, shelf.load(made))
    shelf.remove(made.slot)


def main() -> None:
    folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
    seen: dict[str, Any] = {}
    for rank, workers in ((0, 1), (0, 2), (1, 2)):
        told = seen[f"{rank} of {workers}"] = {}
        with worker_of_rank(folder, rank, workers) as worker:
            loads_and_swaps(worker, told)
            dropped_ones_come_back(worker, told)
            failures_leave_nothing(worker, told)
            wrong_ones_are_told(worker, told)
            own_ranks(worker, told)
            modules_without_a_layer(worker, told)
            a_version_is_published_again(worker, told)
            an_old_one_is_kept_until_it_is_released(worker, told)
            layers_add_what_the_formula_adds(worker, rank, workers, told)
    seen["reloads"] = observe_reloads(answer.parent)
    seen["buffers"] = observe_buffers(answer.parent)
    answer.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
