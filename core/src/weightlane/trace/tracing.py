"""Runs a loader on stand-ins and gives its placement table. The live model stays bitwise as it was."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from weightlane.packing import torch_dtype
from weightlane.trace.as_if_live import twins_seem_live
from weightlane.trace.coverage import target_coverage
from weightlane.trace.dispatch import VALUE, Dispatcher
from weightlane.trace.live_model import LiveModel, untraceable
from weightlane.trace.past_the_trace import KeptTwins, note_shared_memory, note_unseen_writes
from weightlane.trace.plain_writes import plain_writes_seen
from weightlane.trace.process_state import process_as_found
from weightlane.trace.recorder import Recorder
from weightlane.trace.table import Obstacle, PlacementTable, TableKey, TracedSource
from weightlane.trace.targets import describe_targets, find_targets, note_rebound, note_reformed, standing
from weightlane.trace.twins import twins_in_place
from weightlane.trace.value_probe import PROBES, placed
from weightlane.trace.values import LargeTokens, ValueNeededError

if TYPE_CHECKING:
    from weightlane.trace.values import TokenForm

Load: TypeAlias = Callable[[Iterator[tuple[str, Tensor]]], object]
"""An engine's loader: it is handed (name, tensor) pairs, and what it returns is not looked at."""


def _must_be_written(name: str, tensor: Tensor) -> str:  # noqa: ARG001 - the signature of `Receiver.owned`
    return ""


def _as_it_is(module: nn.Module) -> Mapping[str, Tensor] | None:  # noqa: ARG001 - of `Receiver.loading_form`
    return None


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Receiver:
    """A model and its loader, as an engine's plugin describes them.

    Args:
        model: the live module tree, or one on the meta device.
        load: the engine's own loader of it.
        key: what the table will be true for.
        owned: why a tensor need not be written, by name; "" where it must be.
        loading_form: see `twins.twins_in_place`.
        forget: called before each load, where the loader keeps account of what a load has brought.
    """

    model: nn.Module
    load: Load
    key: TableKey
    owned: Callable[[str, Tensor], str] = _must_be_written
    loading_form: Callable[[nn.Module], Mapping[str, Tensor] | None] = _as_it_is
    forget: Callable[[], None] = _nothing


def trace_load(receiver: Receiver, sources: Sequence[TracedSource], *, style: str) -> PlacementTable:
    """The placement table of a load of `sources`, in the four calls of the loader that `_CALLS` makes of it.

    A sync is one call for each bucket, so what a loader does with a tensor must not depend on what comes in
    the same call: where a load in one call comes out otherwise, that is an obstacle. An exception of the
    loader ends the run and is an obstacle too, with what it said. Must not overlap a forward pass of the
    model: for milliseconds to seconds its parameters are not there.

    Raises:
        ProtocolError: a source has a dtype that this torch does not know.
        EngineError: the model could not be put back as it was.
    """
    for source in sources:
        torch_dtype(source.dtype)
    obstacles = untraceable(receiver.model)
    if obstacles:
        return PlacementTable(receiver.key, style, tuple(sources), (), (), obstacles=obstacles)
    table = _run(receiver, sources, _in_calls(sources), style)
    if len(sources) < 2 or _is_complete(table):
        return table
    whole = trace_call(receiver, sources, style=style)
    apart = _differing(table, whole)
    if not apart:
        return table
    obstacle = Obstacle("per-call", "", tuple(sources[number].canonical for number in apart))
    return msgspec.structs.replace(whole, obstacles=(*whole.obstacles, obstacle))


def trace_call(receiver: Receiver, sources: Sequence[TracedSource], *, style: str) -> PlacementTable:
    """The same of one call with all sources, and no more: what `trace_load` compares with."""
    return _run(receiver, sources, [range(len(sources))], style)


_CALLS = 4


def _in_calls(sources: Sequence[TracedSource]) -> list[Sequence[int]]:
    """Numbers of the sources in several calls, each in order.

    By a digest of the name, so that what a loader may want together is apart in some layer.
    """
    calls: list[list[int]] = [[] for _ in range(_CALLS)]
    for number, source in enumerate(sources):
        calls[xxhash.xxh3_64_intdigest(source.canonical.encode()) % _CALLS].append(number)
    return [call for call in calls if call]


def _run(
    receiver: Receiver, sources: Sequence[TracedSource], calls: Sequence[Sequence[int]], style: str
) -> PlacementTable:
    """One run; more of them where the loader took values, which may not decide where anything goes.

    It may take them from a stand-in, or from a buffer whose values are left to it and that it also loads.
    """
    table, looked = _run_once(receiver, sources, calls, style, LargeTokens())
    if table.obstacles:
        return table
    probes = PROBES if looked.asked else ()
    others = [(looked.asked, VALUE, seen, form, frozenset[int]()) for form, seen in probes]
    if looked.loaded_values:
        loaded = {item.source: None for item in table.placements if item.target in looked.loaded_values}
        others.append((tuple(loaded), "", placed, LargeTokens(), looked.loaded_values))
    for asked, operator, seen, form, changed in others:
        other, _ = _run_once(receiver, sources, calls, style, form, changed)
        if seen(other) != seen(table):
            names = tuple(sources[number].canonical for number in asked)
            obstacle = Obstacle("value-dependent", operator, names, (), "another value takes another way")
            return msgspec.structs.replace(table, obstacles=(obstacle,))
    return table


@dataclass(frozen=True, slots=True)
class _Looked:
    """Where a run may have looked at values: sources of which it took one, and targets by number.

    Those targets are buffers of integers whose twins have values, and a load brings others.
    """

    asked: tuple[int, ...]
    loaded_values: frozenset[int]


def _run_once(
    receiver: Receiver,
    sources: Sequence[TracedSource],
    calls: Sequence[Sequence[int]],
    style: str,
    form: TokenForm,
    changed: frozenset[int] = frozenset(),
) -> tuple[PlacementTable, _Looked]:
    """One run, in which the twins of the targets `changed` have other values than the live tensors."""
    begun = time.perf_counter()
    dtypes = [torch_dtype(source.dtype) for source in sources]
    device = next((item.device for item in receiver.model.parameters()), torch.device("cpu"))
    recorder = Recorder([source.canonical for source in sources])
    seems = torch.device("cpu") if device.type == "meta" else device
    dispatcher = Dispatcher(sources, recorder, seems, form)
    live = LiveModel(receiver.model)
    receiver.forget()
    with (
        _no_collection(),
        process_as_found(),
        torch.no_grad(),
        twins_in_place(receiver.model, receiver.loading_form) as twins,
    ):
        targets = find_targets(receiver, twins)
        for item in targets:
            recorder.add_target(item.names[0], item.twin.tensor)
        with_values = {number for number, item in enumerate(targets) if not item.twin.tensor.is_meta}
        for number in changed:
            targets[number].twin.tensor.copy_(targets[number].twin.tensor == 0)  # each is another one then
        before = standing(receiver.model)
        try:
            with plain_writes_seen(dispatcher), twins_seem_live():
                for call in calls:
                    receiver.load(
                        (sources[number].wire, dispatcher.stand_in(number, dtypes[number])) for number in call
                    )
        except ValueNeededError:
            pass  # recorded where it was raised
        except Exception as error:  # noqa: BLE001 - whatever the engine's loader raises is a result
            detail = f"{type(error).__name__}: {str(error)[:500]}"
            recorder.block("error", type(error).__name__, [], None, detail)
        note_rebound(receiver.model, before, recorder)
        note_reformed(targets, recorder)
        note_unseen_writes(targets, recorder)
    dispatcher.close()
    described = describe_targets(targets)
    note_shared_memory(targets, described, recorder)
    # A model without data has loaders that rightly make more of the kind.
    kept = KeptTwins(targets, () if device.type == "meta" else recorder.made_without_data())
    del twins, targets, item
    recorder.obstacles.extend(kept.obstacles())
    with torch.no_grad():
        recorder.obstacles.extend(live.changes())
    if dispatcher.parallel or len(calls) > 1:
        recorder.sort()
    table = PlacementTable(
        key=receiver.key,
        style=style,
        sources=tuple(sources),
        targets=described,
        placements=tuple(recorder.placements),
        fills=tuple(recorder.fills),
        obstacles=tuple(recorder.obstacles),
        seconds=time.perf_counter() - begun,
    )
    loaded = frozenset(item.target for item in table.placements if item.target in with_values)
    return table, _Looked(dispatcher.asked, loaded)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stand-ins come by the ten thousand, and each collection would go through all that an engine holds."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _is_complete(table: PlacementTable) -> bool:
    taken = {item.source for item in table.placements}
    empty = sum(not source.elements for source in table.sources)
    whole = len(taken) + empty == len(table.sources) and not table.obstacles
    return whole and all(item.complete for item in target_coverage(table))


def _differing(table: PlacementTable, other: PlacementTable) -> list[int]:
    """Sources that two runs place otherwise."""
    mine, theirs = set(table.placements), set(other.placements)
    return sorted({item.source for item in mine ^ theirs})
