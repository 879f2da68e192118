"""Adapters into the `LLM` of this very process: what its owner gets, and what a broken load is caught by."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import weightlane as wl
from weightlane_vllm import adapter_shelf
from weightlane_vllm.lora_layers import LoraLayers
from weightlane_vllm.lora_request import lora_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane

PROMPT = [17, 250, 33, 8, 120, 64, 3]
LONG = [(7 * place + 3) % 512 for place in range(200)]
"""More than one block of the prefix cache, which is 128 tokens on a CPU."""
TOKENS = 8


class Policy:
    """A peft-wrapped model that changes, and what it says itself."""

    def __init__(self, folder: str, **fields: Any) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **fields})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.model = get_peft_model(base, config).train(mode=False)
        self._steps = 0
        self.train()

    @torch.no_grad()
    def train(self) -> None:
        generator = torch.Generator().manual_seed(self._steps)
        self._steps += 1
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)

    @torch.no_grad()
    def says(self) -> tuple[list[int], list[float]]:
        ids, chosen = list(PROMPT), []
        for _ in range(TOKENS):
            row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            chosen.append(float(row[ids[-1]]))
        return ids[len(PROMPT) :], chosen


def distance(some: tuple[list[int], list[float]], other: tuple[list[int], list[float]]) -> float:
    """Infinite where tokens differ: JSON has a word for that in Python."""
    if some[0] != other[0]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(some[1], other[1], strict=True))


class Owner:
    """Who made the `LLM`, and generates with it past weightlane's front."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    def says(self, ref: Any) -> tuple[list[int], list[float]]:
        """With an adapter, or with the base where `ref` is None."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, detokenize=False)
        (output,) = self.llm.generate(
            [{"prompt_token_ids": PROMPT}],
            parameters,
            use_tqdm=False,
            lora_request=lora_request(ref) if ref else None,
        )
        tokens, rows = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        return tokens, [rows[place][token].logprob for place, token in enumerate(tokens)]

    def base(self) -> dict[str, torch.Tensor]:
        model = self.worker.model_runner.get_model()
        live = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.clone() for name, tensor in live}


def sync_adapters(llm: Any, folder: str) -> dict[str, Any]:
    """Everything that was seen, by what was done."""
    owner = Owner(llm)
    seen: dict[str, Any] = {"plain_names": raised(lambda: load_plainly(owner))}
    for swap in ("two_slot", "paused"):
        policy = Policy(folder)
        with open_lane(owner, policy, swap=swap) as lane:
            seen[swap] = [one_sync(owner, policy, lane, version) for version in (1, 2, 3)]
            if swap == "two_slot":
                seen["failed"] = fails_in_the_middle(owner, policy, lane)
                seen["dropped"] = is_dropped(owner, policy, lane)
            seen[f"{swap}-wrong"] = wrong_loads(owner, policy, lane)
    with mock.patch.object(sys.modules[__name__], "PROMPT", LONG):
        seen["beside"] = beside_the_lane(owner, folder)
    policy = Policy(folder, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 12, "up_proj": 2})
    with open_lane(owner, policy) as lane:
        seen["patterns"] = one_sync(owner, policy, lane, 1)
        expression = lane.plan().replicas[0].adapter
        assert expression is not None
        seen["patterns"]["form"] = expression.form
        said, held = owner.says(lane.adapter_ref()), owner.base()
        lane.sync(version=2)
        now = owner.base()
        seen["unchanged"] = {
            "said": owner.says(lane.adapter_ref()) == said,
            "base": all(torch.equal(held[name], now[name]) for name in held),
        }
    seen["merged"] = merged_syncs(owner, Policy(folder))
    return seen


def merged_syncs(owner: Owner, policy: Policy) -> list[dict[str, Any]]:
    """What the base alone says, once the adapter is in it."""
    seen = []
    with open_lane(owner, policy, mode="merged") as lane:
        for version in (1, 2, 3):
            stale = policy.says()
            policy.train()
            lane.sync(version=version)
            truth = policy.says()
            seen.append(
                {
                    "moved": distance(truth, stale) >= 1e-2,
                    "distance": distance(truth, owner.says(None)),
                    "held": len(owner.worker.list_loras()),
                }
            )
    return seen


def load_plainly(owner: Owner) -> None:
    """What a sync would do that knows of no era: a checkpoint's own name, and the value that is there."""
    model = owner.worker.model_runner.get_model()
    live = dict(model.named_parameters())["model.embed_tokens.base_layer.weight"]
    model.load_weights(iter([("model.embed_tokens.weight", live.detach().clone())]))


def open_lane(owner: Owner, policy: Policy, **options: Any) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=policy.model),
        rollout=[wl.rollout("vllm", engine=owner.llm)],
        transport="inprocess",
        **{"mode": "adapter", **options},
    )


def one_sync(owner: Owner, policy: Policy, lane: Lane, version: int) -> dict[str, Any]:
    stale, before = policy.says(), owner.base()
    policy.train()
    report = lane.sync(version=version)
    truth, after = policy.says(), owner.base()
    (through_us,) = lane.replicas[0].generate([PROMPT], max_tokens=TOKENS, adapter=lane.adapter_ref())
    return {
        "phases": [phase.phase.value for phase in report.phases],
        "moved": distance(truth, stale) >= 1e-2,
        "distance": distance(truth, owner.says(lane.adapter_ref())),
        "through_us": distance(truth, (list(through_us.token_ids), list(through_us.logprobs))),
        "version": through_us.weight_version,
        "base_unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "held": len(owner.worker.list_loras()),
    }


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def beside_the_lane(owner: Owner, folder: str) -> dict[str, Any]:
    """What the owner of the engine does between the steps of a lane, or past it."""
    policy = Policy(folder)
    with open_lane(owner, policy) as lane:
        lane.sync(version=1)
        old, served = lane.adapter_ref(), policy.says()
    policy.train()
    with open_lane(owner, policy) as lane:
        lane.stage(version=1)  # a trainer that began anew: the name is in use
        seen: dict[str, Any] = {"old_serves": distance(served, owner.says(old))}
        lane.commit()
        seen["published_again"] = distance(policy.says(), owner.says(lane.adapter_ref()))
        seen["reload"] = raised(lambda: owner.llm.collective_rpc("reload_weights"))
        policy.train()
        report = lane.sync(version=2)
        seen["phases"] = [phase.phase.value for phase in report.phases]
        seen["after_the_reload"] = distance(policy.says(), owner.says(lane.adapter_ref()))
        seen["gone"] = raised(lambda: owner.says(old))
        seen["then"] = distance(policy.says(), owner.says(lane.adapter_ref()))
    return seen


def fails_in_the_middle(owner: Owner, policy: Policy, lane: Lane) -> dict[str, Any]:
    ref, truth = lane.adapter_ref(), policy.says()
    layer = LoraLayers(owner.worker).sites()["model.layers.1.mlp.down_proj"].layer
    policy.train()
    with mock.patch.object(layer, "set_lora", side_effect=RuntimeError("in the middle")):
        error = raised(lambda: lane.sync(version=4))
    return {
        "error": error,
        "old_serves": distance(truth, owner.says(ref)),
        "same_name": lane.adapter_ref() == ref,
        "held": len(owner.worker.list_loras()),
        "next": one_sync(owner, policy, lane, 5),
    }


def is_dropped(owner: Owner, policy: Policy, lane: Lane) -> dict[str, Any]:
    """What vLLM's own weight transfer ends with since 0.28; before, it is done by hand."""
    runner = owner.worker.model_runner
    getattr(runner, "reset_lora_state", runner.lora_manager.remove_all_adapters)()
    held = len(owner.worker.list_loras())
    return {"held": held, "distance": distance(policy.says(), owner.says(lane.adapter_ref()))}


def wrong_loads(owner: Owner, policy: Policy, lane: Lane) -> dict[str, Any]:
    """One rule undone at a time: what the sync says, and what would have been served without the check."""
    honest = adapter_shelf.lora_model
    truth = policy.says()

    def folded_twice(load: Any, number: int, layers: Any) -> Any:
        made = honest(load, number, layers)
        for lora in made.loras.values():
            lora.lora_b = lora.lora_b * lora.scaling  # what a shared tensor has at its second push
        return made

    def half(load: Any, number: int, layers: Any) -> Any:
        made = honest(load, number, layers)
        made.loras = {name: lora for name, lora in made.loras.items() if ".layers.0." in name}
        return made

    seen: dict[str, Any] = {}
    for number, (name, broken) in enumerate((("folded_twice", folded_twice), ("half", half))):
        with mock.patch.object(adapter_shelf, "lora_model", broken):
            error = raised(lambda number=number: lane.sync(version=10 + number))  # type: ignore[misc]
            # The worker looks before it serves, and the controller looks again at what it was told.
            with (
                mock.patch("weightlane.adapter_swap.binding_problems", return_value=[]),
                mock.patch("weightlane.verify.binding_problems", return_value=[]),
            ):
                lane.sync(version=20 + number)
            symptom = distance(truth, owner.says(lane.adapter_ref()))
        seen[name] = {"error": error, "symptom": symptom}
    lane.sync(version=30)
    seen["afterwards"] = distance(truth, owner.says(lane.adapter_ref()))
    return seen
