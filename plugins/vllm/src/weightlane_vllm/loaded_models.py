"""The models that one worker holds: the one that serves and, where it has one, the one that drafts for it."""

from __future__ import annotations

import secrets
import weakref
from typing import TYPE_CHECKING, Any

from weightlane.receiver import LiveTensor
from weightlane_vllm.drafter import draft_model_of, drafter_of
from weightlane_vllm.model_and_drafter import root_of

if TYPE_CHECKING:
    from torch import nn

    from weightlane_vllm.draft_routes import LoadRoutes
    from weightlane_vllm.drafter import Drafter

_INCARNATIONS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class LoadedModels:
    """Looked up at each call: an engine may put new ones in their place.

    Args:
        worker: vLLM's own worker object.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def model(self) -> nn.Module:
        """The one that serves."""
        model: nn.Module = self._worker.model_runner.get_model()
        return model

    @property
    def draft_model(self) -> nn.Module | None:
        """The drafter's, where it has one that can be reached."""
        return draft_model_of(self._worker.model_runner)

    @property
    def drafter(self) -> Drafter | None:
        """What drafts, and what a sync does with it; None where nothing does."""
        return drafter_of(self._worker)

    @property
    def root(self) -> nn.Module:
        """Both under one root."""
        return root_of(self.model, self.draft_model)

    def written_by(self, routes: LoadRoutes) -> nn.Module:
        """What a load writes: the model, and its drafter where any of the load goes there."""
        return root_of(self.model, self.draft_model if routes.reach_the_drafter else None, routes.draft)

    @property
    def incarnation(self) -> str:
        """That of the model and of its drafter."""
        models = (self.model, self.draft_model)
        return ".".join(incarnation_of(model) for model in models if model is not None)


def incarnation_of(model: nn.Module) -> str:
    """A word for this very model object, the same whoever asks in this process."""
    return _INCARNATIONS.setdefault(model, secrets.token_hex(8))


def live_tensors(root: nn.Module) -> tuple[LiveTensor, ...]:
    """Parameters, then buffers, each once; shapes of this worker's own shard."""
    from weightlane.packing import dtype_name

    parameters = [
        LiveTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in root.named_parameters()
    ]
    buffers = [
        LiveTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype), kind="buffer")
        for name, tensor in root.named_buffers()
    ]
    return (*parameters, *buffers)
