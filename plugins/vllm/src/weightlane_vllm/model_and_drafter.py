"""A model and its drafter as one receiver: one stream of tensors goes to both, each its own part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from weightlane.errors import EngineError
from weightlane_vllm.draft_routes import PREFIX, DraftRoutes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

_REFUSALS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What loaders raise for a tensor that they cannot take; whatever else is not theirs and passes."""


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
        """Hands each loader its part, in order, in one call of it; none where it has no part.

        Raises:
            EngineError: the drafter's loader refused a tensor; names it, which vLLM's loaders do not.
        """
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
            self._draft(for_drafter)

    def _draft(self, tensors: list[tuple[str, Tensor]]) -> None:
        from weightlane.trace.values import ValueNeededError

        at = ""

        def one_by_one() -> Iterator[tuple[str, Tensor]]:
            nonlocal at
            for name, tensor in tensors:
                at = name
                yield name, tensor

        try:
            self.drafter.load_weights(one_by_one())
        except ValueNeededError:
            raise  # a trace's own, which ends it
        except _REFUSALS as error:
            raise EngineError(
                f"The loader of the drafter ({type(self.drafter).__name__}) refused {at}.",
                f"{type(error).__name__}: {error}",
                "Send it in the shape in which the drafter holds it, or leave it out of the export.",
            ) from error


def root_of(model: nn.Module, drafter: nn.Module | None, routes: DraftRoutes | None = None) -> nn.Module:
    """Both under one root; the model itself where there is no drafter."""
    return model if drafter is None else ModelAndDrafter(model, drafter, routes or DraftRoutes())


def model_of(root: nn.Module) -> nn.Module:
    """The model that serves, of what `root_of` gave."""
    return root.model if isinstance(root, ModelAndDrafter) else root
