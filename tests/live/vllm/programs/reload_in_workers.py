"""Layerwise reloads of packed models without an engine: what each packed layer computes afterwards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from plain_workers import loaded_worker
from tiny_checkpoints import make
from transfer_in_workers import raised, transfer_into
from transformers import AutoModelForCausalLM

import weightlane_vllm.layerwise_reload as layerwise
from weightlane.messages import WireTensor
from weightlane_vllm.patches import plain_cpu_weights
from weightlane_vllm.worker import VllmWorkerEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Reloaded:
    """One packed worker and a trainer's model whose weights change."""

    def __init__(self, worker: Any, folder: Path, trainer: Any = None) -> None:
        self.worker = worker
        self.engine = VllmWorkerEngine(worker)
        self.model = worker.model_runner.get_model()
        self.trainer = trainer or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.first_trace = self.trace()

    def sent(self) -> list[tuple[str, Any]]:
        return [(name, item.detach()) for name, item in self.trainer.named_parameters()]

    def wires(self) -> list[WireTensor]:
        return [WireTensor(name, tuple(item.shape), "float32") for name, item in self.sent()]

    def trace(self) -> str:
        return self.engine.trace(self.wires()).digest()

    def layers(self) -> Iterator[tuple[str, Any]]:
        yield from self.model.named_modules()

    def checkpoint_path(self, path: str) -> str:
        return path

    @torch.no_grad()
    def train(self) -> None:
        for parameter in self.trainer.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)

    def sync(self, buckets: int = 4) -> None:
        """In several buckets whose memory is used again after each call, as a ring's is."""
        self.sync_of("", buckets=buckets)

    def sync_of(self, *prefixes: str, buckets: int = 4) -> None:
        """The same of those whose names begin so; under the names that were seen to be taken."""
        wires = self.engine._traced._wire_of
        sent = [(wires.get(name, name), item) for name, item in self.sent() if name.startswith(prefixes)]
        self.engine.begin(1)
        for bucket in torch.arange(len(sent)).chunk(buckets):
            self.load([sent[number] for number in bucket.tolist()])
        self.engine.finish(1)

    def load(self, tensors: list[tuple[str, Any]]) -> None:
        lent = [(name, tensor.clone()) for name, tensor in tensors]
        self.engine.load_weights(lent)
        for _, tensor in lent:
            tensor.fill_(float("nan"))

    @torch.no_grad()
    def off(self) -> dict[str, float]:
        """Per kind of layer, how far the worst is from the trainer's, relative to the largest output."""
        weights = dict(self.trainer.state_dict())
        worst: dict[str, float] = {}
        for path, layer in self.layers():
            if not hasattr(layer, "cpu_linear"):
                continue
            holder, _, own = self.checkpoint_path(path).rpartition(".")
            pieces = [f"{holder}.{piece}".lstrip(".") for piece in FUSED.get(own, (own,))]
            weight = torch.cat([weights[f"{piece}.weight"] for piece in pieces])
            inputs = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
            # Told by what packing made: the plain weight stands beside a packed head.
            computed = layer.cpu_linear(inputs, layer.weight, None)[:, : len(weight)]
            wanted = inputs @ weight.T
            distance = float((computed - wanted).abs().nan_to_num(nan=9.0).max() / wanted.abs().max())
            worst[own] = max(worst.get(own, 0.0), distance)
        return worst

    def emptied(self) -> int:
        return sum(not item.numel() for item in self.model.parameters())


@contextmanager
def instead(name: str, other: Any) -> Iterator[None]:
    """A rule of ours undone."""
    kept = getattr(layerwise, name)
    setattr(layerwise, name, other)
    try:
        yield
    finally:
        setattr(layerwise, name, kept)


def observe_reloads(folder: Path) -> dict[str, Any]:
    patched = plain_cpu_weights().active
    plain_cpu_weights().undo()
    try:
        return {kind: _observed(make(kind, folder)) for kind in ("dense", "tied")}
    finally:
        if patched:
            plain_cpu_weights().apply()


def _observed(folder: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    seen: dict[str, Any] = {}
    with loaded_worker(folder) as worker:
        at = Reloaded(worker, folder)
        path: Any = at.engine._loading.path(at.engine._facts(), at.engine.describe().live)
        seen["path"], seen["evidence"] = path.name, list(path.evidence)
        seen["emptied"], seen["before"] = at.emptied(), at.off()
        addresses = [item.data_ptr() for item in at.model.parameters() if item.numel()]
        at.train()
        seen["stale"] = at.off()
        at.sync()
        seen["synced"] = at.off()
        at.train()
        at.sync(buckets=1)
        seen["again"], seen["emptied_again"] = at.off(), at.emptied()
        seen["addresses_stay"] = addresses == [
            item.data_ptr() for item in at.model.parameters() if item.numel()
        ]
        seen["traced_alike"] = at.trace() == at.first_trace
        _engines_own(at, seen)
        _controls(at, seen)
        _failures(at, seen)
        seen["transfer"] = transfer_into(at)
    return seen


def _engines_own(at: Reloaded, seen: dict[str, Any]) -> None:
    """What `reload_weights` and vLLM's own weight transfer do: their wrapped loaders stay on its records."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(at.model)
    at.model.load_weights((name, item.clone()) for name, item in at.sent())
    finalize_layerwise_reload(at.model, at.worker.vllm_config.model_config)
    with instead("put_loaders_back", lambda _: None):
        seen["loaders_left_wrapped"] = at.trace() == at.first_trace
    seen["traced_after_the_engines_own"] = at.trace() == at.first_trace


def _controls(at: Reloaded, seen: dict[str, Any]) -> None:
    at.train()
    with instead("pack_tied_again", lambda _: None):
        at.sync()
    seen["tied_head_forgotten"] = at.off()
    with instead("_owned", iter):
        at.sync()
    seen["borrowed"] = at.off()
    at.sync()
    at.train()
    at.engine.begin(1)
    at.load([(name, item) for name, item in at.sent() if name.endswith("layers.0.self_attn.q_proj.weight")])
    seen["one_shard_error"] = raised(at.engine.finish, 1)
    seen["one_shard"] = at.off()
    at.sync()
    seen["repaired"] = at.off()


def _failures(at: Reloaded, seen: dict[str, Any]) -> None:
    tensors = at.sent()
    # Of layer 0: the first shard alone arrives before the sync ends.
    first = next(number for number, (name, _) in enumerate(tensors) if "q_proj.weight" in name)
    part = tensors[: first + 1]

    def left_in_the_middle() -> None:
        at.train()
        at.engine.begin(1)
        at.load(part)

    left_in_the_middle()
    wrong = (tensors[first + 1][0], torch.zeros(3, 3))
    seen["failed"] = raised(at.load, [wrong])
    seen["closed"] = not layerwise.is_open(at.model)
    seen["after_failure"] = raised(at.load, tensors[first + 1 :])
    seen["finish_after_failure"] = raised(at.engine.finish, 1)
    at.sync()
    seen["after_failed"] = at.off()
    left_in_the_middle()
    at.train()
    at.sync()
    seen["after_left"] = at.off()
    left_in_the_middle()
    at.train()
    with instead("abandon", lambda _: None):  # the engine's own way: a layer that waits is not begun anew
        session = layerwise.LayerwiseReload(at.model, at.worker.vllm_config)
        session.begin()
        seen["left_and_not_dropped"] = raised(session.load, at.sent())
    at.sync()
    seen["in_the_end"] = at.off()
