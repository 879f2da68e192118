"""Buffers that a trainer sends and the model's own loader does not reach: written in place, by name.

vLLM's loaders take parameters, and persistent buffers where a model uses `AutoWeightsLoader`; a buffer that
is not persistent reaches none, and one that a model's own loop over parameters passes over keeps its old
value without a word (the correction bias of a router trained by balance, for one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane_vllm.mapper import NameMapper, read_rules, renamed_prefixes
from weightlane_vllm.names import resolve
from weightlane_vllm.namespace import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from weightlane.trace.table import PlacementTable

Routes = dict[str, str]
"""The name that travels, and the buffer that it stands for."""


def unreached_buffers(model: nn.Module, table: PlacementTable) -> Routes:
    """Sources of a traced load that landed nowhere and stand for a live buffer, by the plugin's own rules."""
    placed = {item.source for item in table.placements}
    missing = [source for number, source in enumerate(table.sources) if number not in placed]
    if not missing:
        return {}
    buffers = live_buffers(model)
    space = _namespace(model)
    routes: Routes = {}
    for source in missing:
        target = resolve(source.canonical, space).target
        if target in buffers:
            routes[source.wire] = target
    return routes


class BufferWrites:
    """The model's loader with buffers beside it. Both are looked up at each call.

    Args:
        model: the live one, or one with stand-ins in the place of its tensors.
        routes: names that are kept from its loader.
    """

    def __init__(self, model: nn.Module, routes: Mapping[str, str]) -> None:
        self._model = model
        self._routes = routes

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> object:
        """One call of the loader with what is not routed; none where all is.

        Raises:
            EngineError: a buffer is gone, or its shape or dtype is another.
        """
        load: Any = self._model.load_weights
        if not self._routes:
            return load(iter(tensors))
        routed, rest = split(tensors, self._routes)
        write_buffers(self._model, self._routes, routed)
        return load(iter(rest)) if rest else None


def split(
    tensors: Iterable[tuple[str, Tensor]], routes: Mapping[str, str]
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Those that are routed, and the rest, each in order."""
    routed: list[tuple[str, Tensor]] = []
    rest: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        (routed if name in routes else rest).append((name, tensor))
    return routed, rest


def write_buffers(model: nn.Module, routes: Mapping[str, str], tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copies values into live buffers; all are checked before the first is written.

    Raises:
        EngineError: a buffer is gone, or its shape or dtype is another.
    """
    import torch

    live = live_buffers(model)
    for name, tensor in tensors:
        _require_like(routes[name], live.get(routes[name]), name, tensor)
    with torch.no_grad():
        for name, tensor in tensors:
            live[routes[name]].copy_(tensor)


def live_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Every buffer under every name, as it is now: engines put others in their place."""
    return dict(model.named_buffers(remove_duplicate=False))


def _require_like(target: str, buffer: Tensor | None, name: str, tensor: Tensor) -> None:
    if buffer is None:
        raise EngineError(
            f"The model has no buffer {target}, which {name} was to be written to.",
            "It had one when the load was traced.",
            "Connect again.",
        )
    if buffer.shape != tensor.shape:
        raise EngineError(
            f"Buffer {target} has shape {list(buffer.shape)}, and {name} has {list(tensor.shape)}.",
            "A copy would repeat values or fail in the middle.",
            "Send the model that the engine runs.",
        )
    if buffer.dtype != tensor.dtype and not (buffer.is_floating_point() and tensor.is_floating_point()):
        raise EngineError(
            f"Buffer {target} has dtype {buffer.dtype}, and {name} has {tensor.dtype}.",
            "Only one floating dtype is turned into another.",
            "Export the buffer in the dtype that the engine holds.",
        )


def _namespace(model: nn.Module) -> Namespace:
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapper_loads = "load_weights" in BaseLayerWithLoRA.__dict__
    rules = read_rules(model, wrapper_loads=wrapper_loads)
    mapper = NameMapper(
        rules.patterns, rules.substrings, rules.stacked, renamed_prefixes(model), rules.suffixes
    )
    # Under every name: a module that stands in two places may be loaded under its second name.
    live = {*dict(model.named_parameters(remove_duplicate=False)), *live_buffers(model)}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    return Namespace(live, mapper, packed, wrapper_loads=wrapper_loads, expert_prefix=rules.expert_prefix)
