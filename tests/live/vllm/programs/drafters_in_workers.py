"""A model and its multi-token prediction in one worker without an engine: packed, with LoRA, and kept.

vLLM's own classes, loaders and packing. Embeddings and head are shared as its proposer does it.

python drafters_in_workers.py FOLDER ANSWER
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from lora_workers import FakeRunner
from plain_workers import FakeWorker, loaded_worker
from reload_in_workers import Reloaded
from tiny_drafters import MtpTrainer, mtp_checkpoint
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightlane.messages import WireTensor
from weightlane.trace.coverage import coverage_problems
from weightlane_vllm.drafter import DRAFTER
from weightlane_vllm.one_rank import clean_process, place_of_rank
from weightlane_vllm.patches import plain_cpu_weights
from weightlane_vllm.worker import VllmWorkerEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}
HERE, THERE = "draft.model.mtp_layers.2.mtp_block.", "model.mtp_layers.0."


class Drafting(Reloaded):
    """One worker with both models, and a trainer of both."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self.both = MtpTrainer(folder)
        super().__init__(worker, folder, self.both.model)
        self.drafter = worker.model_runner.drafter.model

    def layers(self) -> Iterator[tuple[str, Any]]:
        yield from self.engine._models.root.named_modules()

    def checkpoint_path(self, path: str) -> str:
        return path.replace(HERE, THERE).replace("draft.", "").replace(".base_layer", "")

    def holds_the_trainers(self) -> bool:
        live, wanted = dict(self.drafter.named_parameters()), self.both.drafts_with()
        return all(torch.equal(live[name], wanted[name]) for name in wanted if live[name].numel())

    def problems(self, *without: str) -> list[str]:
        sent = [item for item in self.wires() if not any(word in item.name for word in without)]
        found = coverage_problems([self.engine.trace(sent)], {}, receiver="the worker")
        return [f"{problem.kind} {problem.subject}" for problem in found]


@contextmanager
def drafting(folder: Path, **more: Any) -> Iterator[Drafting]:
    with loaded_worker(folder, speculative_config=SPECULATIVE, **more) as worker:
        config, model = worker.vllm_config, worker.model_runner.get_model()
        if config.lora_config is not None:
            worker.model_runner = FakeRunner(model, config)
        drafter: Any = get_model(
            vllm_config=config, model_config=config.speculative_config.draft_model_config
        )
        drafter.model.embed_tokens, drafter.lm_head = model.model.embed_tokens, model.lm_head
        worker.model_runner.drafter = SimpleNamespace(model=drafter)  # as runners before 0.26 have it
        yield Drafting(worker, folder)


def observe_drafters(folder: Path) -> dict[str, Any]:
    checkpoint = mtp_checkpoint(folder)
    patched = plain_cpu_weights().active
    plain_cpu_weights().undo()
    try:
        seen = {"packed": _synced(checkpoint), "kept": _kept(checkpoint)}
        plain_cpu_weights().apply()
        seen["lora"] = _synced(checkpoint, enable_lora=True, max_loras=2, max_lora_rank=8)
        seen["ranks"] = _two_ranks(checkpoint)
    finally:
        if patched:
            plain_cpu_weights().apply()
        else:
            plain_cpu_weights().undo()
    return seen


def _synced(checkpoint: Path, **more: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    with drafting(checkpoint, **more) as at:
        path: Any = at.engine._loading.path(at.engine._facts(), at.engine.describe().live)
        seen: dict[str, Any] = {"path": path.name, "problems": at.problems()}
        seen["left_out"] = at.problems("mtp_layers")
        at.problems()
        seen["emptied"] = sum(not item.numel() for item in at.drafter.parameters())
        at.train()
        seen["stale"], seen["old"] = at.off(), at.holds_the_trainers()
        at.sync()
        seen["synced"], seen["holds"] = at.off(), at.holds_the_trainers()
        at.train()
        at.sync(buckets=7)
        seen["again"], seen["holds_again"] = at.off(), at.holds_the_trainers()
    return seen


def _kept(checkpoint: Path) -> dict[str, Any]:
    """Packed, and never put in its loading form: what it computes stays bit by bit."""
    torch.manual_seed(1)
    with mock.patch.dict(os.environ, {DRAFTER: "keep"}), drafting(checkpoint) as at:
        seen: dict[str, Any] = {"problems": at.problems("mtp_layers")}
        inputs = torch.randn(3, 64)

        def computes() -> list[torch.Tensor]:
            packed = [item for item in at.drafter.model.mtp_layers.modules() if hasattr(item, "cpu_linear")]
            fit = [item for item in packed if item.input_size_per_partition == 64]
            return [item.cpu_linear(inputs, item.weight, None) for item in fit]

        before, held = computes(), {name: item.clone() for name, item in at.drafter.named_parameters()}
        at.train()
        at.sync_of("model.layers", "model.norm", "model.embed_tokens", "lm_head")
        after, now = computes(), dict(at.drafter.named_parameters())
        seen["computes"] = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        shared = ("model.embed_tokens.weight", "lm_head.weight")
        seen["holds"] = all(torch.equal(held[name], now[name]) for name in held if name not in shared)
        seen["follows"] = not torch.equal(held[shared[0]], now[shared[0]])
    return seen


def _two_ranks(checkpoint: Path) -> dict[str, Any]:
    """What both workers of tensor parallelism 2 would write, each built with what is its own."""
    sent = MtpTrainer(checkpoint).model.state_dict()
    wires = [WireTensor(name, tuple(tensor.shape), "float32") for name, tensor in sent.items()]
    tables = []
    for rank in (0, 1):
        with ExitStack() as stack:
            stack.enter_context(clean_process())
            stack.enter_context(place_of_rank(rank, 2))
            config = EngineArgs(
                model=str(checkpoint),
                dtype="float32",
                tensor_parallel_size=2,
                max_model_len=128,
                skip_tokenizer_init=True,
                enforce_eager=True,
                speculative_config=SPECULATIVE,
            ).create_engine_config()
            config.parallel_config.rank = rank
            config.compilation_config.static_forward_context = {}
            stack.enter_context(set_default_torch_dtype(torch.float32))
            stack.enter_context(set_current_vllm_config(config))
            model: Any = initialize_model(vllm_config=config)
            draft = config.speculative_config.draft_model_config
            drafter: Any = initialize_model(vllm_config=config, model_config=draft)
            drafter.model.embed_tokens, drafter.lm_head = model.model.embed_tokens, model.lm_head
            worker = FakeWorker(model, config)
            worker.rank = rank
            worker.model_runner.drafter = SimpleNamespace(model=drafter)
            tables.append(VllmWorkerEngine(worker).trace(wires))
    shapes = [{item.name: list(item.shape) for item in table.targets} for table in tables]
    return {
        "problems": [str(item) for item in coverage_problems(tables, {}, receiver="the workers")],
        "input_proj": [told["draft.model.mtp_layers.2.input_proj.weight"] for told in shapes],
        "qkv_proj": [told[f"{HERE}self_attn.qkv_proj.weight"] for told in shapes],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(observe_drafters(Path(sys.argv[1]))))
