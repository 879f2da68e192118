"""Traces a load of a vLLM model: its names' style, its loading form, and what is the engine's own.

Runs inside the worker that holds the model, or over a model on the meta device. Nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightlane.trace.coverage import target_coverage
from weightlane.trace.table import PlacementTable, TableKey, TracedSource
from weightlane_vllm.buffers import BufferWrites, Routes, unreached_buffers
from weightlane_vllm.draft_routes import PREFIX, DraftRoutes, LoadRoutes
from weightlane_vllm.facts import DISTRIBUTIONS, ENGINE, installed_version
from weightlane_vllm.loading_form import loading_form_of
from weightlane_vllm.model_and_drafter import ModelAndDrafter, root_of
from weightlane_vllm.styles import Wrappers, styled_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from weightlane.messages import WireTensor
    from weightlane.trace.tracing import Receiver
    from weightlane_vllm.styles import NameStyle


def trace_of(model: nn.Module, key: TableKey, tensors: Sequence[WireTensor]) -> PlacementTable:
    """The table of the first style of names that writes every target and leaves no source behind.

    Where none does, that of the style whose loader took the most elements: its gaps are what a person has to
    look at. A worker that holds a part of the model takes a part of the sources, and may try every style.

    Args:
        model: as the worker runs it, or as it is built on the meta device.
        key: what the table will be true for.
        tensors: with canonical names, full shapes and dtypes.
    """
    return traced_load(model, key, tensors).table


@dataclass(frozen=True, slots=True)
class TracedLoad:
    """A table, and where its load goes that the model's own loader is not handed."""

    table: PlacementTable
    routes: LoadRoutes


@dataclass(frozen=True, slots=True)
class DraftPart:
    """A drafter beside the model, and its part of a load, all by canonical name (see `draft_tracing`).

    `names` are what its loader is handed, `buffers` what is written to a buffer of it, `alone` what the
    model's loader is not handed. `kept` says why the drafter need not be written, "" where it must be.
    """

    model: nn.Module
    names: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()
    kept: str = ""

    def routes(self, sources: Sequence[TracedSource]) -> LoadRoutes:
        """The same by the names that travel."""
        wires = {source.canonical: source.wire for source in sources}
        return LoadRoutes(
            {wires[name]: PREFIX + buffer for name, buffer in self.buffers.items()},
            DraftRoutes(
                {wires[name]: handed for name, handed in self.names.items()},
                frozenset(wires[name] for name in self.alone),
            ),
        )


def traced_load(
    model: nn.Module, key: TableKey, tensors: Sequence[WireTensor], draft: DraftPart | None = None
) -> TracedLoad:
    """The same with what has to be written beside the loader: buffers that it was seen not to reach.

    Args:
        model: as in `trace_of`.
        key: as there.
        tensors: as there.
        draft: where a drafter runs beside the model; the table is then of both, under the names of
            `ModelAndDrafter`.
    """
    wrappers = wrappers_of(model)
    loads: list[TracedLoad] = []
    for style in wrappers.styles:
        load = trace_in_style(model, key, tensors, style, wrappers, draft=draft)
        found = {} if _complete(load.table) else unreached_buffers(model, load.table)
        if found:  # its gaps say more: a buffer of another shape is told by name
            load = trace_in_style(model, key, tensors, style, wrappers, found, draft)
        loads.append(load)
        if _complete(load.table):
            return load
    return max(loads, key=_taken)


def trace_in_style(
    model: nn.Module,
    key: TableKey,
    tensors: Sequence[WireTensor],
    style: NameStyle,
    wrappers: Wrappers,
    buffers: Routes | None = None,
    draft: DraftPart | None = None,
) -> TracedLoad:
    """That of one style, complete or not, with `buffers` written beside the loader; see `traced_load`."""
    import torch

    from weightlane.trace.tracing import trace_load

    place_of = _PlaceOf(model)
    alone = draft.alone if draft else ()
    sources = [
        TracedSource(
            item.name,
            item.name if item.name in alone else styled_name(style, item.name, wrappers, place_of),
            item.shape,
            item.dtype,
        )
        for item in tensors
    ]
    routes = LoadRoutes(buffers or {}).with_those(draft.routes(sources) if draft else LoadRoutes())
    root = root_of(model, draft.model if draft else None, routes.draft)
    receiver = receiver_of(root, key, routes.buffers, kept=draft.kept if draft else "")
    # Not under inference mode: what is made there may not be changed outside of it, twins included.
    with torch.inference_mode(mode=False):
        return TracedLoad(trace_load(receiver, sources, style=style), routes)


def receiver_of(
    model: nn.Module, key: TableKey, buffers: Mapping[str, str] | None = None, *, kept: str = ""
) -> Receiver:
    """The model as a trace takes it: its own loader, the form in which it loads, what is the engine's own.

    `kept` says why what a drafter alone holds need not be written.
    """
    from weightlane.trace.tracing import Receiver

    load = BufferWrites(model, buffers or {}).load
    return Receiver(model, load, key, _EngineOwned(model, kept), loading_form_of)


def table_key(vllm_config: Any, *, worker: int = 0) -> TableKey:
    """From the engine's live configuration."""
    parallel = vllm_config.parallel_config
    architectures = getattr(vllm_config.model_config.hf_config, "architectures", None) or ()
    return TableKey(
        engine=ENGINE,
        engine_version=installed_version(DISTRIBUTIONS),
        architecture=",".join(architectures),
        worker=worker,
        workers=parallel.world_size,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        expert_parallel=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
        lora=vllm_config.lora_config is not None,
    )


def live_tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under every name that they have."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def wrappers_of(model: nn.Module) -> Wrappers:
    """The LoRA wrappers that stand in this model now."""
    from vllm.lora.layers import BaseLayerWithLoRA

    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    found = {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, BaseLayerWithLoRA)
    }
    experts: dict[str, str] = {}
    for path, module in found.items():
        routed = getattr(module.base_layer, "routed_experts", None)
        if routed is not None:
            experts[path] = str(getattr(routed, "lora_base_layer_prefix", ""))
    return Wrappers(frozenset(found), experts, {whole: tuple(pieces) for whole, pieces in packed.items()})


class _PlaceOf:
    """The receiver's own name for a canonical one, by the mapper that the model class declares."""

    def __init__(self, model: nn.Module) -> None:
        mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
        self._map = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None)

    def __call__(self, name: str) -> str:
        return (self._map(name) if self._map else name) or name


class _EngineOwned:
    """Why a tensor of this model need not be written, by what made it; "" where it must be.

    The scales of attention are registered by the engine itself, at 1, and belong to its quantised cache.
    Which they are is asked of the function that registers them. What a drafter shares with the model has the
    model's name as well, which decides.
    """

    def __init__(self, model: nn.Module, kept: str) -> None:
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        self._kept = kept if isinstance(model, ModelAndDrafter) else ""

        scales = _attention_scales()
        self._names: dict[str, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, AttentionLayerBase):
                for name in scales & module._buffers.keys():
                    self._names[f"{path}.{name}"] = (
                        f"{type(module).__name__} makes it itself, for its quantised cache"
                    )

    def __call__(self, name: str, tensor: Tensor) -> str:  # noqa: ARG002 - the signature of `Receiver.owned`
        return self._names.get(name, "") or (self._kept if name.startswith(PREFIX) else "")


def _attention_scales() -> set[str]:
    from torch import nn
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    blank = nn.Module()
    set_default_quant_scales(blank, register_buffer=True)
    return set(blank._buffers)


def _complete(table: PlacementTable) -> bool:
    if table.obstacles or not all(item.complete for item in target_coverage(table)):
        return False
    return len({item.source for item in table.placements}) == len(table.sources)


def _taken(load: TracedLoad) -> int:
    return sum(item.elements for item in load.table.placements)
