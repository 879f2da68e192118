"""What the probed engine is asked for beside lanes: vLLM's own weight transfer, and its layerwise reload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlane.program import EngineCall

if TYPE_CHECKING:
    from weightlane.front.client import FrontEndpoint

_SECONDS = 300.0


class FrontSyncClient:
    """vLLM's calls for a weight transfer, made in the engine's process by its front."""

    takes_weight_version = False  # the oldest engines take none

    def __init__(self, engine: FrontEndpoint) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version
        self._call("finish_weight_update")

    def _call(self, name: str, *given: Any) -> None:
        route = f"transfer {json.dumps({'call': name, 'given': given})}"
        self._engine.call(EngineCall(route, timeout_seconds=_SECONDS))


def asked_reload(engine: FrontEndpoint, checkpoint: Path) -> list[dict[str, Any]]:
    """Has every worker load a checkpoint through vLLM's layerwise reload; what each saw."""
    route = f"reload {json.dumps({'folder': str(checkpoint)})}"
    told: list[dict[str, Any]] = json.loads(engine.call(EngineCall(route, timeout_seconds=_SECONDS)))
    return told


def transferred(llm: Any, asked: dict[str, Any]) -> None:
    """Runs beside the engine: one call of its weight transfer."""
    from weightlane_vllm.transfer_sender import OfflineClient

    getattr(OfflineClient(llm), asked["call"])(*asked["given"])


def reloaded_in_worker(worker: Any, folder: str) -> dict[str, Any]:
    """Runs inside the worker: a load by `LayerwiseReload`, after one of vLLM's own was left open."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    from weightlane.messages import WireTensor
    from weightlane.packing import dtype_name
    from weightlane_vllm.layerwise_reload import LayerwiseReload, is_open
    from weightlane_vllm.worker import VllmWorkerEngine

    tensors = load_file(Path(folder) / "model.safetensors")
    told = [WireTensor(name, tuple(item.shape), dtype_name(item.dtype)) for name, item in tensors.items()]
    engine = VllmWorkerEngine(worker)
    before = engine.trace(told)
    model = worker.model_runner.get_model()
    addresses = {name: item.data_ptr() for name, item in engine.live_tensors().items()}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
    seen = {"vLLM's left open": is_open(model)}
    session = LayerwiseReload(model, worker.vllm_config)
    session.begin()
    seen["emptied"] = sum(item.device.type == "meta" for item in model.parameters())
    for source in before.sources:  # one at a time, on the worker's device, in memory that is used again
        lent = tensors[source.canonical].to(worker.device)
        session.load([(source.wire, lent)])
        lent.fill_(float("nan"))
    session.finish()
    seen["left open"] = is_open(model)
    seen["addresses stay"] = addresses == {
        name: item.data_ptr() for name, item in engine.live_tensors().items()
    }
    seen["traced alike"] = engine.trace(told).digest() == before.digest()
    return seen
