"""What is seen of one traced model: figures, problems, differences from the oracle, and its name maps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weightlane.contexts import MapNamesContext
from weightlane.manifest import Manifest, TensorSpec
from weightlane.messages import WireTensor
from weightlane.testing.element_oracle import compare_with_oracle
from weightlane.trace.coverage import coverage_problems
from weightlane.types import Phase
from weightlane_vllm.eras import ERAS
from weightlane_vllm.plugin import weightlane_map_names
from weightlane_vllm.tracing import receiver_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.facts import EngineFacts
    from weightlane.receiver import NameEntry, WorkerDescription
    from weightlane.trace.table import PlacementTable
    from weightlane_vllm.worker import VllmWorkerEngine


@dataclass
class Seen:
    """One configuration; lists are empty where all is well."""

    name: str
    started: bool = True
    reason: str = ""
    style: str = ""
    version: str = ""
    seconds: float = 0.0
    writes: int = 0
    targets: int = 0
    sources: int = 0
    checkpoint_forms: int = 0
    problems: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    maps_differ: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def checkpoint_of(description: WorkerDescription) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(item.name, item.shape, "float32") for item in description.expected)


def observe(name: str, engine: VllmWorkerEngine, model: Any) -> tuple[Seen, PlacementTable]:
    """Traces a live model once for its figures, and holds the table against everything that could deny it."""
    description = engine.describe()
    before = fingerprint(model)
    begun = time.perf_counter()
    table = engine.trace(checkpoint_of(description))
    seconds = time.perf_counter() - begun
    seen = Seen(name, seconds=round(seconds, 3))
    fill_figures(seen, table)
    if table.key.workers == 1:
        seen.problems = problems_of([table], name)
    compare(seen, model, table)
    seen.changed = differing(before, fingerprint(model))
    seen.maps_differ = map_differences(description, table)
    return seen, table


def problems_of(tables: Sequence[PlacementTable], name: str) -> list[str]:
    """Those of all workers of one replica together."""
    found = coverage_problems(tables, {}, receiver=name)
    return [f"{item.kind} {item.subject}: {item.what}" for item in found]


def fill_figures(seen: Seen, table: PlacementTable) -> None:
    seen.style, seen.version = table.style, table.key.engine_version
    seen.writes, seen.targets, seen.sources = len(table.placements), len(table.targets), len(table.sources)
    seen.checkpoint_forms = sum(target.form == "checkpoint" for target in table.targets)
    seen.renamed = [item.wire for item in table.sources if item.wire != item.canonical]


def compare(seen: Seen, model: Any, table: PlacementTable) -> None:
    found = compare_with_oracle(receiver_of(model, table.key), table)
    seen.differences = [f"{item.target}: {item.elements}: {item.detail}" for item in found]


def map_differences(description: WorkerDescription, table: PlacementTable) -> list[str]:
    """The hook asked with the table and without it."""
    manifest = Manifest(
        Phase.FULL,
        1,
        tuple(TensorSpec(item.name, item.shape, "float32", (0,)) for item in description.expected),
    )
    facts: EngineFacts | None = description.facts
    assert facts is not None

    def asked(known: PlacementTable | None) -> dict[str, tuple[Any, ...]]:
        context = MapNamesContext(ERAS[0], facts, manifest, description, known)
        return {entry.canonical: _told(entry) for entry in weightlane_map_names(context)}

    static, traced = asked(None), asked(table)
    return [f"{name}: {static[name]} {traced[name]}" for name in static if static[name] != traced[name]]


def _told(entry: NameEntry) -> tuple[Any, ...]:
    return (entry.wire, entry.dtype, entry.targets, entry.dropped)


def fingerprint(model: Any) -> dict[str, Any]:
    """Every tensor's object, address, layout, attributes and bits; every module's own entries."""
    found: dict[str, Any] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        attributes = {key: id(value) for key, value in tensor.__dict__.items()}
        layout = (id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), type(tensor))
        found[name] = (layout, attributes, tensor.detach().clone())
    for path, module in model.named_modules(remove_duplicate=False):
        own = {key: id(value) for key, value in module.__dict__.items()}
        found[f"module {path}"] = (own, list(module._parameters), list(module._buffers))
    return found


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [name for name in before if name not in after] + [name for name in after if name not in before]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        bits = not isinstance(old[2], torch.Tensor) or torch.equal(old[2], new[2])
        plain = old[:2] == new[:2] and (isinstance(old[2], torch.Tensor) or old[2] == new[2])
        if not bits or not plain:
            names.append(name)
    return names
