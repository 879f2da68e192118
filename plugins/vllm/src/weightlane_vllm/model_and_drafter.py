"""A model and its drafter as one receiver: one stream of tensors goes to both, each its own part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from weightlane_vllm.draft_routes import PREFIX, DraftRoutes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class ModelAndDrafter(nn.Module):
    """Both under one root: the model's tensors under their own names, the drafter's after `draft.`.

    A tensor that they share is one tensor with two names. torch joins names of modules by dots, and none
    after an empty one, which is how the model keeps its names.

    Args:
        model: the one that serves.
        drafter: its drafter's.
        routes: what of a load goes to the drafter; without any, its loader is never called.
    """

    def __init__(self, model: nn.Module, drafter: nn.Module, routes: DraftRoutes) -> None:
        super().__init__()
        self._modules[""] = model
        self._modules[PREFIX.removesuffix(".")] = drafter
        self._routes = routes

    @property
    def model(self) -> Any:
        """The one that serves."""
        return self._modules[""]

    @property
    def drafter(self) -> Any:
        """The other."""
        return self._modules[PREFIX.removesuffix(".")]

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Hands each loader its part, in order, in one call of it; none where it has no part."""
        for_model: list[tuple[str, Tensor]] = []
        for_drafter: list[tuple[str, Tensor]] = []
        for name, tensor in tensors:
            if name not in self._routes.alone:
                for_model.append((name, tensor))
            if name in self._routes.names:
                for_drafter.append((self._routes.names[name], tensor))
        if for_model:
            self.model.load_weights(iter(for_model))
        if for_drafter:
            self.drafter.load_weights(iter(for_drafter))


def root_of(model: nn.Module, drafter: nn.Module | None, routes: DraftRoutes | None = None) -> nn.Module:
    """Both under one root; the model itself where there is no drafter."""
    return model if drafter is None else ModelAndDrafter(model, drafter, routes or DraftRoutes())


def model_of(root: nn.Module) -> nn.Module:
    """The model that serves, of what `root_of` gave."""
    return root.model if isinstance(root, ModelAndDrafter) else root
