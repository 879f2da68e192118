"""The reference engine's worker: writes checkpoint tensors into the live model."""

from __future__ import annotations

import os
import socket
import uuid
from typing import TYPE_CHECKING, Any

from weightlane.base_digest import base_problems, value_digests
from weightlane.checkpoint import checkpoint_tensors_of_model
from weightlane.errors import EngineError, Problem, SyncError, near_names
from weightlane.gpu_identity import gpu_uuid
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.trace.table import TableKey, TracedSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding
    from weightlane.messages import ReceivePlan, WireTensor
    from weightlane.reference.engine import ReferenceEngine
    from weightlane.trace.table import PlacementTable

STYLE = "plain"
"""This engine's names are the checkpoint's own."""


class ReferenceWorker:
    """An `AdapterWorkerEngine` over the model of a `ReferenceEngine`.

    Every write is `copy_` into the live tensor, looked up by name at that moment. A sync is complete when
    each expected tensor that is not tied was written once. `live_names` gives the model's own names by
    checkpoint name.
    """

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self._incarnation = uuid.uuid4().hex
        checkpoint = checkpoint_tensors_of_model(engine.model)
        inside = [tensor.canonical for tensor in checkpoint if not tensor.live_name]
        if inside:
            raise EngineError(
                f"The reference engine does not support fused experts yet: {inside[0]} and "
                f"{len(inside) - 1} more.",
                f"This transformers version holds them inside other tensors of "
                f"{type(engine.model).__name__}.",
                "Use a dense model, transformers 4, or another engine.",
            )
        self.live_names = {tensor.canonical: tensor.live_name for tensor in checkpoint}
        self._tied = {tensor.canonical: tensor.tied_to for tensor in checkpoint if tensor.tied_to}
        self._written: set[str] = set()

    def describe(self) -> WorkerDescription:
        """This worker now; live tensors are looked up afresh."""
        model = self._engine.model
        live = [
            _live(name, tensor, "parameter")
            for name, tensor in model.named_parameters(remove_duplicate=False)
        ]
        live += [
            _live(name, tensor, "buffer") for name, tensor in model.named_buffers(remove_duplicate=False)
        ]
        expected = [
            ExpectedTensor(item.canonical, item.shape, item.dtype, item.tied_to)
            for item in checkpoint_tensors_of_model(model)
        ]
        return WorkerDescription(
            worker=0,
            workers=1,
            host=socket.gethostname(),
            process_id=os.getpid(),
            incarnation=self._incarnation,
            device=str(model.device),
            gpu_uuid=gpu_uuid(model.device),
            held_version=self._engine.version,
            servable=self._engine.servable,
            live=tuple(live),
            expected=tuple(expected),
            facts=self._engine.facts(),
        )

    def current_incarnation(self) -> str:
        """Made with the engine, and never changed."""
        return self._incarnation

    def released(self) -> Sequence[str]:
        """What sleeps."""
        return self._engine.memory.released

    def synced_tensors(self) -> list[Any]:
        """The live tensors that a full sync writes; others, such as rotary tables, nobody would restore."""
        live = self._live_tensors()
        return [live[name] for name in self.live_names.values()]

    def why_not_whole(self) -> str:
        """Weights that were released are lost until a full sync has written them."""
        return self._engine.memory.why_lost

    def check_plan(self, plan: ReceivePlan) -> Sequence[Problem]:
        """Whatever cannot be written into the live model, by name and by shape; an adapter's other base."""
        if plan.adapter is not None:
            base = plan.adapter.base
            return () if base.sent_by else self.base_problems(base.values)
        live = self._live_tensors()
        problems: list[Problem] = []
        for wire in plan.tensors:
            target = live.get(self.live_names.get(wire.name, ""))
            if target is None or wire.name in self._tied:
                why = "is tied" if wire.name in self._tied else "is not a tensor of this model"
                problems.append(
                    Problem("extra-name", wire.name, why, near=near_names(wire.name, self.live_names))
                )
            elif tuple(target.shape) != wire.shape:
                problems.append(
                    Problem(
                        "shape", wire.name, f"{list(wire.shape)} planned, {list(target.shape)} in the model"
                    )
                )
        return problems

    def base_problems(self, trained_on: Mapping[str, str]) -> Sequence[Problem]:
        """Every tensor's values against those of a trainer's base."""
        live = self._live_tensors()
        held = value_digests({name: live[self.live_names[name]] for name in self.live_names})
        receiver = f"the reference engine (process {os.getpid()})"
        return base_problems(trained_on, held, self._tied, receiver=receiver)

    def trace(self, tensors: Sequence[WireTensor]) -> PlacementTable:
        """Where `load_weights` puts each tensor; waits for a running generation, which needs the weights.

        Raises:
            SyncTimeoutError: a generation still ran after a minute.
        """
        from weightlane.trace.tracing import Receiver, trace_load

        model = self._engine.model
        facts = self._engine.facts()
        key = TableKey(facts.engine, facts.version, type(model).__name__)
        sources = [TracedSource(item.name, item.name, item.shape, item.dtype) for item in tensors]
        # A sync may be open: what it has written so far is its own affair.
        written, self._written = self._written, set()
        try:
            with self._engine.between_generations("A trace"):
                receiver = Receiver(
                    model, lambda pairs: self.load_weights(list(pairs)), key, forget=self._written.clear
                )
                return trace_load(receiver, sources, style=STYLE)
        finally:
            self._written = written

    def live_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model by all of their names."""
        model = self._engine.model
        return dict(
            (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            )
        )

    def begin(self, version: int) -> None:
        """Refuses generation from here until `publish`; waits for a running one."""
        if "weights" in self._engine.memory.released:
            raise SyncError(
                f"Version {version} cannot be written into the reference engine: its weights are released.",
                "It sleeps, and nobody has taken the memory back.",
                'Wake it first, or connect with release=("weights", ...) so that the lane does.',
            )
        self._written.clear()
        self._engine.fence(version)

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """Copies each tensor into the model; `tensors` are (canonical name, full tensor).

        Raises:
            SyncError: an unknown or tied name, another shape, or a name that was already written.
        """
        import torch

        live = self._live_tensors()
        with torch.no_grad():
            for name, tensor in tensors:
                target = live.get(self.live_names.get(name, ""))
                if target is None or name in self._tied:
                    why = (
                        f"It is tied to {self._tied[name]}."
                        if name in self._tied
                        else "The model has no such name."
                    )
                    raise SyncError(f"{name} cannot be written into the reference engine.", why)
                if target.shape != tensor.shape:
                    raise SyncError(
                        f"{name} came with shape {list(tensor.shape)} and the model holds "
                        f"{list(target.shape)}.",
                        "A copy would broadcast or fail half-way.",
                    )
                if name in self._written:
                    raise SyncError(
                        f"{name} came twice in one sync.", "Which of the two is right is not known."
                    )
                target.copy_(tensor)
                self._written.add(name)
        return len(tensors)

    def finish(self, version: int) -> None:
        """Checks that every expected tensor was written.

        Raises:
            SyncError: names what is missing; the engine stays fenced.
        """
        missing = [name for name in self.live_names if name not in self._written and name not in self._tied]
        if missing:
            raise SyncError(
                f"Version {version} is incomplete: {missing[0]} and {len(missing) - 1} more never came.",
                "A full sync writes every tensor of the checkpoint.",
            )
        self._engine.memory.rewritten()

    def publish(self, version: int) -> None:
        """Serves `version` from now on."""
        self._engine.unfence(version)

    def load_adapter(self, load: AdapterLoad) -> AdapterBinding:
        """Binds the adapter to linear modules without serving it."""
        return self._engine.load_adapter(load)

    def serve_adapter(self, slot: str) -> None:
        """Generates with the slot's adapter from now on."""
        self._engine.serve_adapter(slot)

    def remove_adapter(self, slot: str) -> None:
        """Unbinds the slot's adapter."""
        self._engine.remove_adapter(slot)

    def _live_tensors(self) -> dict[str, Any]:
        # Looked up at each call: whoever replaces a parameter must not leave us writing into the old one.
        return dict(self._engine.model.state_dict(keep_vars=True))


def _live(name: str, tensor: Any, kind: Any) -> LiveTensor:
    return LiveTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), kind)
