"""Runs a loader on stand-ins and gives its placement table. The live model stays bitwise as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from weightlane.packing import torch_dtype
from weightlane.trace.dispatch import Dispatcher
from weightlane.trace.plain_writes import plain_writes_seen
from weightlane.trace.recorder import Recorder
from weightlane.trace.table import PlacementTable, TableKey, TracedSource
from weightlane.trace.targets import describe_targets, find_targets, note_rebound, standing
from weightlane.trace.twins import twins_in_place
from weightlane.trace.values import ValueNeededError

Load: TypeAlias = Callable[[Iterator[tuple[str, Tensor]]], object]
"""An engine's loader: it is handed (name, tensor) pairs, and what it returns is not looked at."""


def _must_be_written(name: str, tensor: Tensor) -> str:  # noqa: ARG001 - the signature of `Receiver.owned`
    return ""


def _as_it_is(module: nn.Module) -> Mapping[str, Tensor] | None:  # noqa: ARG001 - of `Receiver.loading_form`
    return None


@dataclass(frozen=True, slots=True)
class Receiver:
    """A model and its loader, as an engine's plugin describes them.

    Args:
        model: the live module tree, or one on the meta device.
        load: the engine's own loader of it.
        key: what the table will be true for.
        owned: why a tensor need not be written, by name; "" where it must be.
        loading_form: see `twins.twins_in_place`.
    """

    model: nn.Module
    load: Load
    key: TableKey
    owned: Callable[[str, Tensor], str] = _must_be_written
    loading_form: Callable[[nn.Module], Mapping[str, Tensor] | None] = _as_it_is


def trace_load(receiver: Receiver, sources: Sequence[TracedSource], *, style: str) -> PlacementTable:
    """The placement table of one run of the loader over `sources`.

    An exception of the loader ends the run and is an obstacle of the table, with what it said. Must not
    overlap a forward pass of the model: for milliseconds to seconds its parameters are not there.

    Raises:
        ProtocolError: a source has a dtype that this torch does not know.
    """
    dtypes = [torch_dtype(source.dtype) for source in sources]
    begun = time.perf_counter()
    device = next((item.device for item in receiver.model.parameters()), torch.device("cpu"))
    recorder = Recorder([source.canonical for source in sources])
    dispatcher = Dispatcher(sources, recorder, torch.device("cpu") if device.type == "meta" else device)
    handed = (
        (source.wire, dispatcher.stand_in(number, dtype))
        for number, (source, dtype) in enumerate(zip(sources, dtypes, strict=True))
    )
    with torch.no_grad(), twins_in_place(receiver.model, receiver.loading_form) as twins:
        targets = find_targets(receiver, twins)
        for target in targets:
            recorder.add_target(target.names[0], target.twin.tensor)
        before = standing(receiver.model)
        try:
            with plain_writes_seen(dispatcher):
                receiver.load(handed)
        except ValueNeededError:
            pass  # recorded where it was raised
        except Exception as error:  # noqa: BLE001 - whatever the engine's loader raises is a result
            detail = f"{type(error).__name__}: {str(error)[:500]}"
            recorder.block("error", type(error).__name__, [], None, detail)
        note_rebound(receiver.model, before, recorder)
    dispatcher.close()
    if dispatcher.parallel:
        recorder.sort()
    return PlacementTable(
        key=receiver.key,
        style=style,
        sources=tuple(sources),
        targets=describe_targets(targets),
        placements=tuple(recorder.placements),
        fills=tuple(recorder.fills),
        obstacles=tuple(recorder.obstacles),
        seconds=time.perf_counter() - begun,
    )
