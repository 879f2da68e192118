"""Whether a table that came from elsewhere is one: about what was asked, and within its own bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import ProtocolError
from weightlane.manifest import DTYPE_BYTES
from weightlane.trace.geometry import extent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.messages import WireTensor
    from weightlane.trace.table import PlacementTable

_MOST_TOLD = 3


def require_table(table: PlacementTable, asked: Sequence[WireTensor], *, sender: str) -> None:
    """Raises ProtocolError unless the table is about the tensors that were asked and fits in itself.

    Args:
        table: as it was decoded.
        asked: canonical names, full shapes and dtypes.
        sender: who gave it, for the message.
    """
    faults = [*_source_faults(table, asked), *_target_faults(table)]
    if not faults:
        faults = [*_placement_faults(table), *_fill_faults(table)]
    if faults:
        more = f" and {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
        raise ProtocolError(
            f"The placement table of {sender} cannot be used: {'; '.join(faults[:_MOST_TOLD])}{more}.",
            "It is damaged, or a plugin made it wrongly.",
            "Report this to the engine's plugin, with the architecture.",
        )


def require_workers(tables: Sequence[PlacementTable], *, sender: str) -> None:
    """Raises ProtocolError unless there is one table for each worker, in order, and all count alike."""
    told = [(table.key.worker, table.key.workers) for table in tables]
    if told != [(number, len(tables)) for number in range(len(tables))]:
        said = ", ".join(f"worker {worker} of {workers}" for worker, workers in told)
        raise ProtocolError(
            f"The {len(tables)} placement tables of {sender} are those of {said}.",
            "Each worker writes its own part, so that a table for each is needed, once.",
            "Report this to the engine's plugin.",
        )


def _source_faults(table: PlacementTable, asked: Sequence[WireTensor]) -> list[str]:
    given = {source.canonical: (source.shape, source.dtype) for source in table.sources}
    wanted = {tensor.name: (tensor.shape, tensor.dtype) for tensor in asked}
    faults = [f"it says nothing of {name}" for name in wanted if name not in given]
    faults += [f"nobody asked for {name}" for name in given if name not in wanted]
    faults += [
        f"{name} was asked as {list(wanted[name][0])} {wanted[name][1]} and is {list(shape)} {dtype} in it"
        for name, (shape, dtype) in given.items()
        if name in wanted and wanted[name] != (shape, dtype)
    ]
    for what, names in (
        ("canonical name", [source.canonical for source in table.sources]),
        ("wire name", [source.wire for source in table.sources]),
    ):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            faults.append(f"two sources have {what} {twice}")
    return faults


def _target_faults(table: PlacementTable) -> list[str]:
    return [
        f"target {target.name} has shape {list(target.shape)}, strides {list(target.stride)}, dtype "
        f"{target.dtype}"
        for target in table.targets
        if len(target.shape) != len(target.stride)
        or any(size < 0 for size in (*target.shape, *target.stride, target.offset))
        or target.dtype not in DTYPE_BYTES
    ]


def _placement_faults(table: PlacementTable) -> list[str]:
    faults: list[str] = []
    sizes = [source.elements for source in table.sources]
    spans = [extent(target.shape, target.stride) for target in table.targets]
    for number, item in enumerate(table.placements):
        if not (0 <= item.source < len(sizes) and 0 <= item.target < len(spans)):
            faults.append(f"placement {number} has source {item.source} and target {item.target}")
            continue
        taken = [(size, stride) for size, stride, _ in item.axes]
        given = [(size, stride) for size, _, stride in item.axes]
        if not _inside(item.source_offset, taken, sizes[item.source]):
            faults.append(f"placement {number} leaves {table.sources[item.source].canonical}")
        if not _inside(item.target_offset, given, spans[item.target]):
            faults.append(f"placement {number} leaves {table.targets[item.target].name}")
        if any(size > 1 and not stride for size, stride in given):
            faults.append(f"placement {number} writes one element of {table.targets[item.target].name} twice")
        source, target = table.sources[item.source], table.targets[item.target]
        if (item.casts[-1] if item.casts else source.dtype) != target.dtype:
            faults.append(f"placement {number} gives {target.name} a dtype that it does not have")
        if any(dtype not in DTYPE_BYTES for dtype in item.casts):
            faults.append(f"placement {number} casts by {', '.join(item.casts)}")
    return faults


def _fill_faults(table: PlacementTable) -> list[str]:
    faults: list[str] = []
    spans = [extent(target.shape, target.stride) for target in table.targets]
    for number, item in enumerate(table.fills):
        known = 0 <= item.target < len(spans)
        if not known or not _inside(item.offset, item.axes, spans[item.target]):
            faults.append(f"fill {number} leaves its target")
    return faults


def _inside(offset: int, axes: Sequence[tuple[int, int]], within: int) -> bool:
    if offset < 0 or any(size < 1 or stride < 0 for size, stride in axes):
        return False
    return offset + sum((size - 1) * stride for size, stride in axes) < within
