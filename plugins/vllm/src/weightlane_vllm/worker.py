"""The engine-specific part of the agent, inside a vLLM worker process."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import EngineError, Problem, SyncError
from weightlane.probes import NotViable
from weightlane.receiver import ExpectedTensor, WorkerDescription
from weightlane_vllm.adapter_refusals import adapter_problems
from weightlane_vllm.adapter_shelf import shelf_of
from weightlane_vllm.drafter import beyond_expected, drafter_obstacle
from weightlane_vllm.facts import LORA_LOAD_WEIGHTS, worker_facts
from weightlane_vllm.foreign_writes import foreign_writes_of
from weightlane_vllm.loaded_models import LoadedModels, live_tensors
from weightlane_vllm.mapper import read_rules, renamed_prefixes
from weightlane_vllm.names import is_taken, resolve
from weightlane_vllm.namespace import Namespace
from weightlane_vllm.patches import plain_cpu_weights
from weightlane_vllm.refusals import EngineFeatures, no_load_path, prefetched_layers, refusals_of
from weightlane_vllm.sleep_watch import watch_of
from weightlane_vllm.ties import live_owner
from weightlane_vllm.traced_names import TracedNames
from weightlane_vllm.weight_loading import WeightLoading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding
    from weightlane.facts import EngineFacts
    from weightlane.messages import ReceivePlan, WireTensor
    from weightlane.trace.table import PlacementTable

_WAKE = 'Wake it first, or connect with release=("weights", "kv_cache") so that the lane does.'


class VllmWorkerEngine:
    """Loads checkpoint tensors through the model class's own `load_weights`, adapters through `AdapterShelf`.

    Nothing of the model is kept between calls: an engine may put a new one in its place. What traces told is,
    with the incarnation that they were made of.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._sleep = watch_of(worker)
        self._foreign = foreign_writes_of(worker)
        self._traced = TracedNames()
        self._models = LoadedModels(worker)
        self._loading = WeightLoading(worker)
        self._asked: tuple[object, tuple[ExpectedTensor, ...]] | None = None

    def describe(self) -> WorkerDescription:
        """This worker now; shapes of live tensors are those of its own shard."""
        model = self._models.model
        config = self._worker.vllm_config
        facts = self._facts()
        live = live_tensors(self._models.root)
        packed = {
            whole: tuple(pieces) for whole, pieces in getattr(model, "packed_modules_mapping", {}).items()
        }
        description = WorkerDescription(
            worker=self._worker.rank,
            workers=config.parallel_config.world_size,
            host=socket.gethostname(),
            process_id=os.getpid(),
            incarnation=self.current_incarnation(),
            device=str(self._worker.device),
            gpu_uuid=_gpu_uuid(self._worker.device),
            live=live,
            packed=packed,
            renames=renamed_prefixes(model),
            facts=facts,
            rules=read_rules(model, wrapper_loads=facts.attributes[LORA_LOAD_WEIGHTS]),
            beyond=beyond_expected(self._models.drafter),
        )
        return msgspec.structs.replace(description, expected=self._expected(description))

    def current_incarnation(self) -> str:
        """That of the model which the worker runs now, and of its drafter."""
        return self._models.incarnation

    def trace(self, tensors: Sequence[WireTensor]) -> PlacementTable:
        """One load of `tensors` by the live model's own loader, on stand-ins.

        What the receiver reads through a tie is left out: vLLM with LoRA raises for it, and without drops it.
        """
        from weightlane_vllm.draft_tracing import draft_part
        from weightlane_vllm.tracing import table_key, traced_load

        self._require_weights("A load cannot be traced in", fix="Wake it before a lane is connected.")
        self._loading.drop_left_open()
        model, drafter = self._models.model, self._models.drafter
        key = table_key(self._worker.vllm_config, worker=self._worker.rank)
        expected = self.describe().expected
        tied = {item.name for item in expected if item.tied_to}
        sent = [item for item in tensors if item.name not in tied]
        part = None
        if drafter is not None and drafter.model is not None:
            names = {item.name for item in expected}
            part = draft_part(model, drafter.model, drafter.policy, key, sent, names)
        load = traced_load(model, key, sent, part)
        self._traced.add(self.current_incarnation(), load.table, load.routes)
        return load.table

    def tied(self) -> Mapping[str, str]:
        """Checkpoint tensors that the live model reads through another one, and that one."""
        return {item.name: item.tied_to for item in self.describe().expected if item.tied_to}

    def live_tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers of the live model and its drafter, under every name that they have."""
        from weightlane_vllm.tracing import live_tensors_of

        return live_tensors_of(self._models.root)

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        """What this era refuses of the engine, and names of the plan that reach no live tensor.

        Where a load was traced, what it was seen to do decides; else the static rules do.
        """
        self._loading.drop_left_open()
        description = self.describe()
        problems = list(refusals_of(self._features()))
        if plan.adapter is not None:
            facts = self._facts()
            receiver = f"worker {description.worker} (vLLM {facts.version})"
            return problems or adapter_problems(self._worker, plan.adapter, facts, receiver=receiver)
        problems = self.load_problems()
        if problems:
            return problems
        receiver = f"worker {description.worker}'s model ({type(self._models.model).__name__})"
        if self._traced.known(description.incarnation):
            return self._traced.unreached([wire.name for wire in plan.tensors], receiver=receiver)
        if description.beyond is not None:
            what = f"worker {description.worker} has a drafter, and no load of these tensors was traced there"
            return [Problem("unreached", description.beyond.taker, what, "Connect again.")]
        space = Namespace.of(description)
        return [
            Problem(
                "unreached",
                wire.name,
                f"no tensor of {receiver} is known to receive it",
                "Leave it out of the export, or report the architecture.",
            )
            for wire in plan.tensors
            if not is_taken(wire.name, space)
        ]

    def released(self) -> Sequence[str]:
        """Memory that sleeps."""
        return self._sleep.released()

    def why_not_whole(self) -> str:
        """Weights that were let go without a copy, or that others wrote, are none until a full sync."""
        return self._sleep.why_lost() or self._foreign.why_unknown()

    def load_problems(self) -> list[Problem]:
        """What stands against any load of whole weights: features of the engine, and no path to load by."""
        live = live_tensors(self._models.root)
        path = self._loading.path(self._facts(), live)
        missing = [no_load_path(path, live)] if isinstance(path, NotViable) else []
        return [*refusals_of(self._features()), *missing]

    def begin(self, version: int) -> None:
        """Opens a layerwise reload where the engine has packed parameters away; else nothing is to be done.

        What a sync before left in the middle is dropped first.
        """
        self._require_weights(f"Version {version} cannot be written into")
        self._loading.drop_left_open()
        routes = self._traced.routes(self.current_incarnation())
        live = live_tensors(self._models.written_by(routes))
        self._loading.begin(self._loading.path(self._facts(), live), routes)

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Gives `tensors` to the model's loader, in plan order.

        What the loader returns is no evidence that it wrote (it names more or fewer than it did), so the
        count is of what it was handed.
        """
        self._loading.load(tensors, self._traced.routes(self.current_incarnation()))
        return len(tensors)

    def finish(self, version: int) -> None:  # noqa: ARG002 - the contract's name
        """Packs again what was packed, and waits for the device, so that a report means written.

        An unquantised dense model keeps nothing else derived from its parameters (those that do are refused
        at plan time).
        """
        self._loading.finish(self._facts(), self._traced.routes(self.current_incarnation()))
        if self._worker.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._worker.device)
        self._sleep.rewritten(but=self._not_written())
        self._foreign.rewritten()

    def publish(self, version: int) -> None:
        """The version label belongs to the engine core, which the front sets; a worker has none."""

    def load_adapter(self, load: AdapterLoad) -> AdapterBinding:
        """Loads an adapter from memory beside what serves, and tells what the live layers then hold."""
        self._require_weights(f"Adapter {load.ref.name} cannot be loaded into")  # its slots are weights too
        return shelf_of(self._worker).load(load)

    def serve_adapter(self, slot: str) -> None:
        """Requests may name the slot's adapter from now on."""
        shelf_of(self._worker).serve(slot)

    def remove_adapter(self, slot: str) -> None:
        """Frees the slot."""
        self._require_weights(f"Adapter slot {slot} cannot be freed in")
        shelf_of(self._worker).remove(slot)

    def _require_weights(self, what: str, *, fix: str = _WAKE) -> None:
        if "weights" in self._sleep.released():
            why = "It sleeps, and nobody has taken the memory back."
            raise SyncError(f"{what} this vLLM worker: its weights are released.", why, fix)

    def _not_written(self) -> str:
        """What of the weights no sync writes, "" where all are: a worker may have lost them."""
        if self._models.draft_model is None:
            return ""
        drafter = self._models.drafter
        routes = self._traced.routes(self.current_incarnation())
        return "" if drafter is None or routes.reach_the_drafter else drafter.policy.kept

    def _facts(self) -> EngineFacts:
        return worker_facts(self._worker, plain_cpu_weights=plain_cpu_weights().active)

    def _features(self) -> EngineFeatures:
        config = self._worker.vllm_config
        transfer = config.kv_transfer_config  # made by the engine itself for kv_offloading_size
        return EngineFeatures(
            quantization=config.model_config.quantization or "",
            experts=int(config.model_config.get_num_experts()),
            lora=config.lora_config is not None,
            pipeline_parallel=config.parallel_config.pipeline_parallel_size,
            data_parallel=config.parallel_config.data_parallel_size,
            latent_attention=bool(config.model_config.use_mla),
            drafter=drafter_obstacle(self._models.drafter),
            kv_connector="" if transfer is None else str(transfer.kv_connector or "a KV connector"),
            prefetched_layers=prefetched_layers(config),
        )

    def _expected(self, description: WorkerDescription) -> tuple[ExpectedTensor, ...]:
        expected = self._checkpoint()
        dtypes = {tensor.name: tensor.dtype for tensor in description.live}
        space = Namespace.of(description)
        traced = self._traced.known(description.incarnation)
        filled: list[ExpectedTensor] = []
        for tensor in expected:
            reached = self._traced.targets_of(tensor.name) if traced else ()
            target = reached[0] if reached else resolve(tensor.name, space).target
            filled.append(
                ExpectedTensor(
                    tensor.name, tensor.shape, dtypes.get(target, ""), tied_to=live_owner(tensor, space)
                )
            )
        return tuple(filled)

    def _checkpoint(self) -> tuple[ExpectedTensor, ...]:
        """What the model's configuration asks for; worked out once, since a large one takes a second."""
        from weightlane.checkpoint import expected_tensors_of_config

        config = self._worker.vllm_config.model_config.hf_config
        if self._asked is None or self._asked[0] is not config:
            try:
                self._asked = (config, expected_tensors_of_config(config))
            except Exception:
                if refusals_of(self._features()):
                    return ()  # the plan is refused for a better reason, by `check_plan`
                raise
        return self._asked[1]


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        raise EngineError(
            f"The worker on {device} cannot tell its GPU's UUID.",
            "This torch build does not give it, and a peer is found by it.",
            "Use torch 2.4 or newer.",
        )
    return str(uuid)
