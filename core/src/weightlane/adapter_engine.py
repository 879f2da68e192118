"""What an engine plugin supplies in addition, inside the engine's worker, to receive adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weightlane.engine_agent import WorkerEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from weightlane.adapters import AdapterBinding, AdapterRef
    from weightlane.peft import AdapterConfig


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One whole adapter.

    `slot` is where it is to be held, never one that serves; `ref` what requests will name; `wire` the
    configuration as the engine's own JSON. `tensors` are by wire name and owned: they may be kept.
    """

    slot: str
    ref: AdapterRef
    config: AdapterConfig
    wire: str
    tensors: Mapping[str, Tensor]


@runtime_checkable
class TakesAdapters(Protocol):
    """Whoever holds adapters in slots. What is removed when is core's decision, never the engine's own.

    Methods are called from one thread at a time; generation may run beside them.
    """

    def load_adapter(self, load: AdapterLoad) -> AdapterBinding:
        """Holds an adapter in `load.slot` without serving it, and tells what it bound, read back.

        Called once a sync with every tensor. Whatever lingers in the slot is replaced. An error means that
        the slot is empty, and that what was served before is untouched.
        """

    def serve_adapter(self, slot: str) -> None:
        """From now on requests that name the slot's `ref` are answered with it; so is whoever names none."""

    def remove_adapter(self, slot: str) -> None:
        """Frees a slot; called once for each adapter that was loaded."""


@runtime_checkable
class AdapterWorkerEngine(WorkerEngine, TakesAdapters, Protocol):
    """A `WorkerEngine` that takes adapters.

    In a sync of an adapter neither `begin`, `load_weights`, `finish` nor `publish` is called.
    """
