"""Traces the load of a live SGLang model, inside its scheduler. SGLang is imported in functions alone.

Names are those of the checkpoint: they are what the requests of this backend carry. Layers wrapped for LoRA
hold the very parameters of the layers that they wrap, and so do their twins, wherever SGLang made them so. It
does not for the experts of a mixture: their checkpoint names then lead nowhere, the table shows it, and the
plan refuses. Nothing is done here to make such a trace complete, since a request could not be sent that way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.trace.table import PlacementTable, TableKey, TracedSource
from weightlane.trace.tracing import Load, Receiver, trace_load
from weightlane_sglang.contract import ENGINE
from weightlane_sglang.scheduler_layout import has_lora, scheduler_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from weightlane.messages import WireTensor

STYLE = "plain"


def tensor_parallel_rank() -> int:
    """Of the scheduler that this is called in."""
    return scheduler_layout().tensor_rank


def trace_model(model: nn.Module, tensors: Sequence[WireTensor]) -> PlacementTable:
    """The table of one load of `tensors` (canonical names, full shapes); the model stays as it is."""
    sources = tuple(TracedSource(item.name, item.name, item.shape, item.dtype) for item in tensors)
    return trace_load(receiver_of(model), sources, style=STYLE)


def live_tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under every name that they have, as tables name targets."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def receiver_of(model: nn.Module) -> Receiver:
    """The model that this scheduler serves, as a trace wants it."""
    return Receiver(model=model, load=_loader_of(model), key=_key(model))


def _loader_of(model: nn.Module) -> Load:
    """Handed a list, as by a request: a loader may go through it twice."""
    load: Any = model.load_weights  # every model class of SGLang has it
    return lambda tensors: load(list(tensors))


def _key(model: nn.Module) -> TableKey:
    import sglang

    layout = scheduler_layout()
    return TableKey(
        engine=ENGINE,
        engine_version=sglang.__version__,
        architecture=type(model).__name__,
        worker=layout.tensor_rank,
        workers=layout.tensor,
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.pipeline,
        expert_parallel=layout.expert,
        lora=has_lora(model),
    )
