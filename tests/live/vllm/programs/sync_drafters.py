"""Engines that draft, each with a trainer in one process: what a sync writes of a drafter, what it leaves.

python sync_drafters.py FOLDER ANSWER KIND...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from adapters_of_own_llm import Owner, Policy, one_sync, open_lane
from sync_packed_llm import Trainer, raised, updated
from tiny_drafters import MtpTrainer, eagle3_checkpoint, mtp_checkpoint, qwen3_checkpoint

import weightlane as wl
from weightlane_vllm.drafter import draft_model_of
from weightlane_vllm.transfer_sender import OfflineClient, WeightSender
from weightlane_vllm.weight_transfer import register

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from weightlane.lane import Lane

MTP = {"method": "mtp", "num_speculative_tokens": 1}
BUFFER = "router_bias"


class Engine:
    """An `LLM` that drafts."""

    def __init__(self, model: Path, speculative: dict[str, Any], **settings: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            worker_extension_cls="weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
            speculative_config=speculative,
            **settings,
        )
        self._counted = 0, 0

    @property
    def runner(self) -> Any:
        """Where the one worker is of this process."""
        return Owner(self.llm).worker.model_runner

    @property
    def drafter(self) -> nn.Module:
        model = draft_model_of(self.runner)
        assert model is not None
        return model

    def own_of_drafter(self) -> dict[str, Tensor]:
        """Copies of what the drafter does not share with the model."""
        shared = {id(tensor) for tensor in held_by(self.runner.get_model()).values()}
        return {
            name: tensor.clone()
            for name, tensor in held_by(self.drafter).items()
            if id(tensor) not in shared and "rotary" not in name and "_scale" not in name
        }

    def accepted(self) -> tuple[int, int]:
        """Tokens that were drafted since the last question, and how many of them were accepted."""
        counters = {item.name: getattr(item, "value", 0) for item in self.llm.get_metrics()}
        now = tuple(int(counters[f"vllm:spec_decode_num_{kind}_tokens"]) for kind in ("draft", "accepted"))
        before, self._counted = self._counted, (now[0], now[1])
        return now[0] - before[0], now[1] - before[1]


def held_by(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def lane(engine: Engine, model: Any) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=model),
        rollout=[wl.rollout("vllm", engine=engine.llm)],
    )


def not_planned(engine: Engine, model: Any) -> str:
    def connected() -> None:
        lane(engine, model).close()

    return raised(connected)


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def synced(engine: Engine, trainer: Trainer, model: Any, look: Callable[[], Any]) -> dict[str, Any]:
    """Two syncs of `model` after a step each, with what `look` says after each."""
    with lane(engine, model) as opened:
        replica = opened.plan().replicas[0]
        seen: dict[str, Any] = {
            "coverage": replica.coverage,
            "owned": replica.trace.owned if replica.trace else 0,
            "notes": [note for note in (*replica.notes, *replica.program.notes) if "drafter" in note],
            "syncs": [],
            "looks": [],
        }
        for version in (1, 2):
            reports: list[Any] = []
            engine.accepted()
            done = updated(engine, trainer, lambda: reports.append(opened.sync(version=version)))  # noqa: B023
            workers = reports[0].replicas[0].workers
            if version == 1:  # the first sync of a lane is the one that is read back
                seen["compared"] = [item.read_back.elements for item in workers]
            seen["syncs"].append({**done, "accepted": engine.accepted()})
            seen["looks"].append(look())
    return seen


def mtp(folder: Path, **settings: Any) -> dict[str, Any]:
    """The drafter comes from the model's own checkpoint, and is trained with it."""
    checkpoint = mtp_checkpoint(folder)
    register()
    engine = Engine(checkpoint, MTP, weight_transfer_config={"backend": "weightlane"}, **settings)
    trainer = MtpTrainer(checkpoint)
    seen: dict[str, Any] = {"drafter": type(engine.drafter).__name__}
    client = OfflineClient(engine.llm)
    seen["transfer"] = raised(WeightSender, client, trainer.model.named_parameters)
    seen["draft_update"] = raised(engine.llm.collective_rpc, "start_draft_weight_update")
    seen["by_attribute"] = engine.runner.drafter.model is engine.drafter
    seen["packed"] = sum(not item.numel() for item in engine.drafter.parameters())
    seen["left_out"] = not_planned(engine, Trainer(checkpoint).model)
    buffer = not seen["packed"]  # a reload knows none but those that stood when the engine loaded
    if buffer:
        engine.drafter.get_submodule("model.mtp_layers.2").register_buffer(BUFFER, torch.zeros(4))
        seen["buffer_left_out"] = not_planned(engine, trainer.model)
        trainer.layer.register_buffer(BUFFER, torch.arange(4.0))

    def is_the_trainers() -> bool:
        wanted = trainer.drafts_with()
        live = held_by(engine.drafter)
        equal = all(torch.equal(live[name], wanted[name]) for name in wanted if live[name].numel())
        if buffer:
            trainer.layer.get_buffer(BUFFER).add_(1.0)  # the next sync brings another
        return equal

    state = trainer.model.state_dict()
    wrong = {**state, "model.mtp_layers.0.input_proj.weight": torch.zeros(64, 64)}
    seen["wrong_shape"] = not_planned(engine, wrong)
    seen["unknown"] = not_planned(engine, {**state, "model.mtp_layers.0.unheard_of.weight": torch.zeros(2)})
    before = engine.own_of_drafter()
    seen |= synced(engine, trainer, trainer.model, is_the_trainers)
    seen["all_moved"] = not any(
        torch.equal(tensor, before[name])
        for name, tensor in engine.own_of_drafter().items()
        if tensor.numel()
    )
    return seen


def own(folder: Path, **settings: Any) -> dict[str, Any]:
    """A drafter with a checkpoint of its own whose names are the model's: kept, or trained as `draft.`."""
    checkpoint, other = qwen3_checkpoint(folder, 2, 0), qwen3_checkpoint(folder, 1, 1)
    speculative = {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}
    engine, trainer = Engine(checkpoint, speculative, **settings), Trainer(checkpoint)
    before = engine.own_of_drafter()
    seen = synced(engine, trainer, trainer.model, lambda: same(engine.own_of_drafter(), before))
    draft = Trainer(other)
    draft.train()
    both = {**trainer.model.state_dict()}
    both |= {f"draft.{name}": tensor for name, tensor in draft.model.state_dict().items()}
    part = {name: tensor for name, tensor in both.items() if name != "draft.lm_head.weight"}
    seen["in_part"] = not_planned(engine, part)

    def is_the_trained() -> bool:
        head = draft.model.lm_head.weight
        return torch.equal(held_by(engine.drafter)["lm_head.weight"], head) and not same(
            engine.own_of_drafter(), before
        )

    seen["trained"] = synced(engine, trainer, both, is_the_trained)
    return seen


def itself(folder: Path, **settings: Any) -> dict[str, Any]:
    """The model's own checkpoint once more as its drafter: every draft is accepted while both are in step."""
    checkpoint = qwen3_checkpoint(folder, 2, 0)
    speculative = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    engine, trainer = Engine(checkpoint, speculative, **settings), Trainer(checkpoint)

    return synced(engine, trainer, trainer.model, lambda: in_step(engine))


def in_step(engine: Engine) -> bool:
    """Whether model and drafter hold the same; LoRA wraps the model alone."""
    held = engine.runner.get_model().named_parameters()
    return same(engine.own_of_drafter(), {name.replace(".base_layer", ""): tensor for name, tensor in held})


def adapters(folder: Path) -> dict[str, Any]:
    """Adapters are the model's alone; the base under them is the drafter's too."""
    checkpoint = qwen3_checkpoint(folder, 2, 0)
    speculative = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    engine = Engine(checkpoint, speculative, **LORA)
    with torch.no_grad():
        for parameter in engine.drafter.parameters():
            parameter.zero_()
    policy, owner = Policy(str(checkpoint)), Owner(engine.llm)
    with open_lane(owner, policy) as opened:
        syncs = [one_sync(owner, policy, opened, version) for version in (1, 2)]
    return {"syncs": syncs, "in_step": in_step(engine)}


def ngram(folder: Path) -> dict[str, Any]:
    """The last of its process: it imports numba, past which vLLM 0.32's CPU platform starts no engine."""
    checkpoint = qwen3_checkpoint(folder, 2, 0)
    engine = Engine(checkpoint, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})
    trainer = Trainer(checkpoint)
    return synced(engine, trainer, trainer.model, lambda: draft_model_of(engine.runner) is None)


def eagle3(folder: Path) -> dict[str, Any]:
    """It shares the model's embeddings, which follow, and keeps the rest."""
    checkpoint = qwen3_checkpoint(folder, 6, 0)
    speculative = {"method": "eagle3", "model": str(eagle3_checkpoint(folder)), "num_speculative_tokens": 2}
    engine, trainer = Engine(checkpoint, speculative), Trainer(checkpoint)
    before = engine.own_of_drafter()

    def kept() -> list[bool]:
        embeddings = held_by(engine.drafter)["model.embed_tokens.weight"]
        return [
            same(engine.own_of_drafter(), before),
            torch.equal(embeddings, trainer.model.model.embed_tokens.weight),
        ]

    return synced(engine, trainer, trainer.model, kept)


def kept(folder: Path) -> dict[str, Any]:
    """With WEIGHTLANE_VLLM_DRAFTER=keep: a trainer without multi-token prediction."""
    checkpoint = mtp_checkpoint(folder)
    engine, trainer = Engine(checkpoint, MTP), Trainer(checkpoint)
    before = engine.own_of_drafter()
    seen = synced(engine, trainer, trainer.model, lambda: same(engine.own_of_drafter(), before))
    seen["exported"] = not_planned(engine, MtpTrainer(checkpoint).model)
    return seen


LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "mtp": mtp,
    "mtp+lora": lambda folder: mtp(folder, **LORA),
    "own": own,
    "own+lora": lambda folder: own(folder, **LORA),
    "itself": itself,
    "itself+lora": lambda folder: itself(folder, **LORA),
    "ngram": ngram,
    "eagle3": eagle3,
    "adapters": adapters,
    "kept": kept,
}


def main() -> None:
    folder, answer, *kinds = sys.argv[1:]
    seen: dict[str, Any] = {}
    for kind in kinds:
        begun = time.perf_counter()
        seen[kind] = KINDS[kind](Path(folder))
        seen[kind]["seconds"] = time.perf_counter() - begun
    Path(answer).write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
