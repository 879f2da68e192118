"""The loads of one worker: in place or layer by layer, with buffers that the loader does not reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.probes import NotViable
from weightlane_vllm.buffers import BufferWrites, split, write_buffers
from weightlane_vllm.facts import RESETS_LORA
from weightlane_vllm.layerwise_reload import LayerwiseReload, abandon
from weightlane_vllm.load_path import LoadPath, choose_path, recorded_names
from weightlane_vllm.loaded_models import LoadedModels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.facts import EngineFacts
    from weightlane.receiver import LiveTensor
    from weightlane_vllm.draft_routes import LoadRoutes


class WeightLoading:
    """Called from one thread at a time. One sync is one session, from `begin` to `finish`.

    Args:
        worker: vLLM's own worker object.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._models = LoadedModels(worker)
        self._session: LayerwiseReload | None = None
        self._late: list[tuple[str, Tensor]] = []

    def path(self, facts: EngineFacts, live: Sequence[LiveTensor]) -> LoadPath | NotViable:
        """How this worker's model is loaded as it stands, or why it cannot be."""
        return choose_path(facts, live, recorded_names(self._models.root))

    def begin(self, path: LoadPath | NotViable, routes: LoadRoutes) -> None:
        """Opens a session where the path needs one; a drafter that nothing goes to stays out of it.

        Raises:
            EngineError: there is no path.
        """
        self._session, self._late = None, []
        if isinstance(path, NotViable):
            raise EngineError(
                "This vLLM worker's weights cannot be loaded.", path.reason, "Start the engine again."
            )
        if path.name == "layerwise-reload":
            session = LayerwiseReload(self._models.written_by(routes), self._worker.vllm_config)
            session.begin()
            self._session = session

    def load(self, tensors: Sequence[tuple[str, Tensor]], routes: LoadRoutes) -> None:
        """Hands `tensors` to the loaders; those for buffers are written, in a session when it has ended."""
        import torch

        if self._session is None:
            with torch.no_grad():
                BufferWrites(self._models.written_by(routes), routes.buffers).load(tensors)
            return
        routed, rest = split(tensors, routes.buffers)
        self._late += [(name, tensor.clone()) for name, tensor in routed]
        self._session.load(rest)

    def finish(self, facts: EngineFacts, routes: LoadRoutes) -> None:
        """Ends the session; the engine's LoRA state goes with it where the engine itself lets it go."""
        session, late = self._session, self._late
        self._session, self._late = None, []
        if session is None:
            return
        session.finish()
        write_buffers(self._models.written_by(routes), routes.buffers, late)
        if facts.attributes.get(RESETS_LORA):
            self._worker.model_runner.reset_lora_state()

    def drop_left_open(self) -> None:
        """Puts the model back after a session that ended in the middle, or one of the engine's own."""
        self._session, self._late = None, []
        abandon(self._models.root)
