"""Trainer and an `LLM` with packed weights and LoRA on in one process: lanes and vLLM's own weight transfer.

python sync_packed_llm.py FOLDER ANSWER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from adapters_of_own_llm import PROMPT, Owner, Policy, distance, one_sync, open_lane
from tiny_checkpoints import make
from transformers import AutoModelForCausalLM

import weightlane as wl
from weightlane_vllm.transfer_sender import OfflineClient, WeightSender
from weightlane_vllm.weight_transfer import register

Said = tuple[list[int], list[float]]


class Trainer:
    """A whole model that changes."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._steps = 0

    @torch.no_grad()
    def train(self) -> None:
        generator = torch.Generator().manual_seed(self._steps)
        self._steps += 1
        for parameter in self.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05 * parameter.std())

    @torch.no_grad()
    def says(self) -> Said:
        ids, chosen = list(PROMPT), []
        for _ in range(8):
            row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            chosen.append(float(row[ids[-1]]))
        return ids[len(PROMPT) :], chosen


def base_says(owner: Owner) -> Said:
    from vllm import SamplingParams

    owner.llm.reset_prefix_cache()
    parameters = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, detokenize=False)
    (output,) = owner.llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)
    tokens, rows = list(output.outputs[0].token_ids), output.outputs[0].logprobs
    return tokens, [rows[place][token].logprob for place, token in enumerate(tokens)]


def raised(function: Any, *given: Any, **named: Any) -> str:
    try:
        function(*given, **named)
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def updated(owner: Owner, trainer: Trainer, update: Any) -> dict[str, Any]:
    stale = trainer.says()
    trainer.train()
    update()
    expected = trainer.says()
    return {"distance": distance(base_says(owner), expected), "moved": distance(stale, expected)}


def full_lane(owner: Owner, folder: Path) -> dict[str, Any]:
    trainer, reports, seen = Trainer(folder), [], {}
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("vllm", engine=owner.llm)],
        transport="inprocess",
        bucket_bytes=40_000,
    ) as lane:
        seen["coverage"] = lane.plan().replicas[0].coverage
        seen["syncs"] = [
            updated(owner, trainer, lambda version=version: reports.append(lane.sync(version=version)))
            for version in (1, 2)
        ]
        seen["buckets"] = reports[0].buckets
        (worker,) = reports[0].replicas[0].workers
        seen["compared"] = [worker.read_back.elements, worker.read_back.not_comparable]
        trainer.train()
        kind = type(owner.worker.model_runner.get_model())
        whole, calls = kind.load_weights, []

        def fails_at_the_third(model: Any, tensors: Any) -> Any:
            calls.append(model)
            if len(calls) == 3:
                raise RuntimeError("in the middle")
            return whole(model, tensors)

        with mock.patch.object(kind, "load_weights", fails_at_the_third):
            seen["failed"] = raised(lane.sync, version=3)
        seen["not_servable"] = raised(lane.replicas[0].generate, [PROMPT], max_tokens=2)
        seen["next"] = updated(owner, trainer, lambda: lane.sync(version=4))
        seen["listed"] = sorted(owner.worker.list_loras())
    return seen


def adapter_lane(owner: Owner, folder: Path) -> dict[str, Any]:
    policy = Policy(str(folder))
    with open_lane(owner, policy) as lane:
        seen = {"syncs": [one_sync(owner, policy, lane, version) for version in (1, 2)]}
        sender, trainer = sender_of(owner, folder)
        sender.send()
        sender.close()
        seen["listed_after_update"] = len(owner.worker.list_loras())
        seen["base_as_before"] = distance(base_says(owner), trainer.says())
        lane.replicas[0].generate([PROMPT], max_tokens=2, adapter=lane.adapter_ref())
        seen["listed_when_asked"] = len(owner.worker.list_loras())
        seen["served_again"] = distance(owner.says(lane.adapter_ref()), policy.says())
    return seen


def sender_of(owner: Owner, folder: Path) -> tuple[WeightSender, Trainer]:
    trainer = Trainer(folder)
    client = OfflineClient(owner.llm)
    return WeightSender(client, trainer.model.named_parameters, bucket_bytes=40_000), trainer


def native_transfer(owner: Owner, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    trainer = Trainer(folder)
    client = OfflineClient(owner.llm)
    seen["not_announced"] = raised(client.start_weight_update)

    def all_but_one() -> Any:
        return list(trainer.model.named_parameters())[:-1]

    seen["incomplete"] = raised(WeightSender, client, all_but_one)
    sender, trainer = sender_of(owner, folder)
    told = [str(version) if client.takes_weight_version else None for version in (1, 2)]
    seen["updates"] = [
        updated(owner, trainer, lambda version=version: sender.send(version)) for version in told
    ]
    if hasattr(owner.llm, "get_weight_version"):
        seen["version"] = owner.llm.get_weight_version()
    honest = sender._client.update_weights

    def other_bytes(info: dict[str, Any]) -> None:
        honest({**info, "digest": "0" * 16})

    with mock.patch.object(sender._client, "update_weights", other_bytes):
        seen["wrong_digest"] = raised(sender.send)
    seen["afterwards"] = updated(owner, trainer, sender.send)
    sender.close()
    seen["closed"] = raised(sender.send)
    return seen


def main() -> None:
    folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
    from vllm import LLM

    checkpoint = make("tied", folder)
    register()
    register()
    llm = LLM(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        worker_extension_cls="weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        weight_transfer_config={"backend": "weightlane"},
    )
    owner = Owner(llm)
    model = owner.worker.model_runner.get_model()
    seen: dict[str, Any] = {"packed": sum(not item.numel() for item in model.parameters())}
    seen["native"] = native_transfer(owner, checkpoint)
    seen["full"] = full_lane(owner, checkpoint)
    seen["adapter"] = adapter_lane(owner, checkpoint)
    answer.write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
