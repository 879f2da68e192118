"""Tables of a model that is built here without data: kept from an earlier call, or traced now."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from weightlane.errors import ProtocolError
from weightlane.trace.built_from import BuiltFrom, built_from
from weightlane.trace.store import TableStore, user_folder
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane.contexts import TraceModelContext
    from weightlane.registry import Registry, Selected
    from weightlane.trace.table import PlacementTable


@dataclass(frozen=True, slots=True)
class BuiltTables:
    """One table per worker, or why there is none.

    `kept_in` is the file that they come from, None where they were traced now. `note` says why they could
    not be kept for the next call; "" where they were.
    """

    tables: tuple[PlacementTable, ...] | Untraced
    kept_in: Path | None = None
    note: str = ""


TablesOf: TypeAlias = "Callable[[Registry, Selected, TraceModelContext], BuiltTables]"
"""How tables are come by: one of the functions of this module."""


def traced_now(registry: Registry, selected: Selected, context: TraceModelContext) -> BuiltTables:
    """Builds the model, and keeps nothing.

    Raises:
        HookError: the plugin failed while it built or traced the model.
    """
    return BuiltTables(registry.call_trace_model(selected, context))


def traced_anew(registry: Registry, selected: Selected, context: TraceModelContext) -> BuiltTables:
    """Builds the model whatever is kept of it, and keeps its tables for the next call; raises likewise."""
    place = _place(registry, selected, context)
    built = registry.call_trace_model(selected, context)
    if isinstance(built, Untraced):
        return BuiltTables(built)
    note = place if isinstance(place, str) else _keep(place, built)
    return BuiltTables(built, note=note and f"the tables are not kept: {note}")


def kept_or_traced(registry: Registry, selected: Selected, context: TraceModelContext) -> BuiltTables:
    """Tables that an earlier call kept of exactly this; else those of `traced_anew`."""
    place = _place(registry, selected, context)
    if not isinstance(place, str):
        kept = place.store.get(place.about, context.tensors)
        if kept is not None:
            return BuiltTables(kept, kept_in=place.store.path_of(place.about))
    return traced_anew(registry, selected, context)


@dataclass(frozen=True, slots=True)
class _Place:
    store: TableStore
    about: BuiltFrom


def _place(registry: Registry, selected: Selected, context: TraceModelContext) -> _Place | str:
    """Where the tables are kept, or why there is no such place."""
    try:
        about = built_from(selected, registry.package_of(selected), context, os.environ)
        if isinstance(about, Untraced):
            return about.reason
        return _Place(TableStore(user_folder(os.environ)), about)
    except (OSError, RuntimeError) as error:
        return str(error)
    except ProtocolError as error:
        return error.what


def _keep(place: _Place, built: tuple[PlacementTable, ...]) -> str:
    """Why they could not be kept; "" where they were."""
    try:
        place.store.put(place.about, built)
    except OSError as error:
        return str(error)
    return ""
