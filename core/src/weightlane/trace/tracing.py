"""Runs a loader on stand-ins and gives its placement table. The live model stays bitwise as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from weightlane.packing import dtype_name, torch_dtype
from weightlane.trace.dispatch import Dispatcher, PlainWrites
from weightlane.trace.recorder import Recorder, storage_key
from weightlane.trace.table import (
    Obstacle,
    PlacementTable,
    TableKey,
    TargetKind,
    TracedSource,
    TracedTarget,
)
from weightlane.trace.twins import Twin, Twins, twins_in_place

Load: TypeAlias = Callable[[Iterator[tuple[str, Tensor]]], object]
"""An engine's loader: it is handed (name, tensor) pairs, and what it returns is not looked at."""

NON_PERSISTENT = "a buffer that no checkpoint holds: the engine makes it itself"


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


@dataclass(slots=True)
class _Named:
    """One target: its twin, its names, and what it is."""

    twin: Twin
    kind: TargetKind
    names: list[str]
    owned: str


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
        targets = _number_targets(receiver, twins, recorder)
        before = _standing(receiver.model)
        try:
            with PlainWrites(dispatcher):
                receiver.load(handed)
        except Exception as error:  # noqa: BLE001 - whatever the engine's loader raises is a result
            detail = f"{type(error).__name__}: {str(error)[:500]}"
            recorder.block("error", type(error).__name__, [], None, detail)
        _note_rebound(receiver.model, before, recorder)
    for item in dispatcher.unused_tokens():
        recorder.block("value-dependent", "aten._local_scalar_dense", item.origins, None)
    return PlacementTable(
        key=receiver.key,
        style=style,
        sources=tuple(sources),
        targets=_described(targets),
        placements=tuple(recorder.placements),
        fills=tuple(recorder.fills),
        obstacles=tuple(recorder.obstacles),
        seconds=time.perf_counter() - begun,
    )


def _number_targets(receiver: Receiver, twins: Twins, recorder: Recorder) -> list[_Named]:
    by_tensor: dict[int, _Named] = {}
    twin_of = {id(twin.tensor): twin for twin in twins.of.values()}

    def add(name: str, tensor: Tensor, kind: TargetKind, owned: str) -> None:
        known = by_tensor.get(id(tensor))
        if known is not None:
            known.names.append(name)
            known.owned = known.owned and owned
            return
        recorder.add_target(name, tensor)
        by_tensor[id(tensor)] = _Named(twin_of[id(tensor)], kind, [name], owned)

    for name, parameter in receiver.model.named_parameters(remove_duplicate=False):
        add(name, parameter, "parameter", receiver.owned(name, parameter))
    for prefix, module in receiver.model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{prefix}.{name}" if prefix else name
                own = NON_PERSISTENT if name in module._non_persistent_buffers_set else ""
                add(full, buffer, "buffer", own or receiver.owned(full, buffer))
    for twin in twins.of.values():
        if id(twin.tensor) not in by_tensor:
            add(twin.place, twin.tensor, "attribute", receiver.owned(twin.place, twin.tensor))
    return list(by_tensor.values())


def _standing(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each name stands for, by object and by memory."""
    held = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: (id(tensor), storage_key(tensor)) for name, tensor in held}


def _note_rebound(model: nn.Module, before: dict[str, tuple[int, int]], recorder: Recorder) -> None:
    after = _standing(model)
    for name in (*before, *(name for name in after if name not in before)):
        if before.get(name) != after.get(name):
            what = "was removed" if name not in after else "is another tensor after the load"
            if name not in before:
                what = "was added by the load"
            recorder.obstacles.append(Obstacle("rebound", "", (), (name,), f"it {what}"))


def _described(targets: Sequence[_Named]) -> tuple[TracedTarget, ...]:
    storages: dict[object, int] = {}
    described: list[TracedTarget] = []
    for item in targets:
        form, live = item.twin.tensor, item.twin.live
        same = live is not None and _looks_alike(form, live)
        # Live tensors on the meta device have no address: each is its own memory.
        shared = same and live is not None and not live.is_meta and live.numel() > 0
        key = (live.untyped_storage().data_ptr(), live.dtype) if shared and live is not None else id(form)
        described.append(
            TracedTarget(
                name=item.names[0],
                shape=tuple(form.shape),
                stride=tuple(form.stride()),
                dtype=dtype_name(form.dtype),
                kind=item.kind,
                storage=storages.setdefault(key, len(storages)),
                offset=int(live.storage_offset()) if shared and live is not None else 0,
                aliases=tuple(item.names[1:]),
                owned=item.owned,
                form="live" if same else "checkpoint",
            )
        )
    return tuple(described)


def _looks_alike(form: Tensor, live: Tensor) -> bool:
    return (form.shape, form.stride(), form.dtype) == (live.shape, live.stride(), live.dtype)
