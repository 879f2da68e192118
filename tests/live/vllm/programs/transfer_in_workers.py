"""vLLM's own worker as far as its weight transfer goes, of every era, around a model without an engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.v1.worker.gpu_worker import Worker

from weightlane_vllm.transfer_layout import BACKEND
from weightlane_vllm.transfer_sender import WeightSender
from weightlane_vllm.weight_transfer import register

if TYPE_CHECKING:
    from reload_in_workers import Reloaded

_THEIRS = (
    "_check_weight_transfer_engine",
    "init_weight_transfer_engine",
    "start_weight_update",
    "_start_weight_update",
    "update_weights",
    "finish_weight_update",
)


class FakeTransferWorker:
    """A worker that has loaded a model and makes the backend; `_THEIRS` of vLLM's `Worker` are put on it."""

    def __init__(self, worker: Any) -> None:
        self.rank = worker.rank
        self.device = worker.device
        self.vllm_config = worker.vllm_config
        self.model_config = worker.vllm_config.model_config
        self.parallel_config = worker.vllm_config.parallel_config
        self.model_runner = SimpleNamespace(
            model=worker.model_runner.get_model(),
            get_model=worker.model_runner.get_model,
            reset_lora_state=lambda: None,
        )
        self._weight_update_active = False
        self._weight_update_is_draft = False
        self._is_checkpoint_format = True

    @property
    def active(self) -> bool:
        return self._weight_update_active

    def load_model(self) -> None:
        self.vllm_config.weight_transfer_config = WeightTransferConfig(backend=BACKEND)
        known = {
            "config": self.vllm_config.weight_transfer_config,
            "vllm_config": self.vllm_config,
            "parallel_config": self.parallel_config,
            "device": self.device,
            "model": self.model_runner.get_model(),
        }
        create: Any = WeightTransferEngineFactory.create_engine
        self.weight_transfer_engine = create(
            **{name: known[name] for name in inspect.signature(create).parameters}
        )


for _name in _THEIRS:
    if hasattr(Worker, _name):
        setattr(FakeTransferWorker, _name, getattr(Worker, _name))


class WorkerClient:
    """A sender's client that calls one worker, as the engine core does."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.versions: list[str | None] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._worker.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._worker.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._worker.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._worker.finish_weight_update()
        self.versions.append(weight_version)


def raised(function: Any, *given: Any) -> str:
    try:
        function(*given)
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def transfer_into(at: Reloaded) -> dict[str, Any]:
    """The same model through vLLM's factory, its worker's calls and our backend."""
    import torch

    torch.accelerator.synchronize = lambda: None  # type: ignore[assignment]  # older workers wait for one
    first, second = register(), register()
    worker: Any = FakeTransferWorker(at.worker)
    worker.load_model()
    engine = worker.weight_transfer_engine
    client = WorkerClient(worker)
    seen: dict[str, Any] = {"made": type(engine).__name__, "registered_twice": first == second}
    seen["not_announced"] = raised(client.start_weight_update)
    part = list(at.trainer.named_parameters())[:-1]
    seen["part"] = raised(WeightSender, client, lambda: part)
    sender = WeightSender(client, at.trainer.named_parameters, bucket_bytes=40_000)
    seen["after_each"] = []
    for version in ("1", "2"):
        at.train()
        sender.send(version)
        seen["after_each"].append(at.off())
    seen["versions"] = list(client.versions)
    at.train()
    initialize_layerwise_reload(at.model)  # as a failed update of vLLM's own backends leaves it
    at.model.load_weights((name, item.clone()) for name, item in at.sent()[:3])
    sender.send()
    seen["after_one_left_open"] = at.off()
    client.start_weight_update()
    seen["cut_short"] = raised(client.finish_weight_update)
    raised(client.update_weights, {"bucket": -1, "digest": ""})  # newer ones end a session when this fails
    with mock.patch.object(
        client, "update_weights", lambda info: worker.update_weights({**info, "digest": "0" * 16})
    ):
        seen["wrong_digest"] = raised(sender.send)
    at.train()
    sender.send()
    seen["healed"], seen["active"] = at.off(), worker.active
    sender.close()
    engine.shutdown()
    seen["unknown_word"] = raised(engine.parse_update_info, {"bucket": 0, "digest": "", "names": []})
    seen["older_way"] = raised(engine.trainer_send_weights, iter(()), {})
    factory: Any = WeightTransferEngineFactory
    del factory._weightlane_registered
    seen["of_somebody_else"] = raised(register)
    factory._weightlane_registered = True
    return seen
