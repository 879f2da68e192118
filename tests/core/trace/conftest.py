"""Small models with hand-written loaders, traced; and what a live model is, by bits and by objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from weightlane.packing import dtype_name
from weightlane.testing.element_oracle import compare_with_oracle
from weightlane.trace.coverage import coverage_problems
from weightlane.trace.table import PlacementTable, TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

KEY = TableKey("reference", "1", "Tiny")


@pytest.fixture(name="fingerprint")
def _fingerprint() -> Callable[[nn.Module], dict[str, Any]]:
    return fingerprint


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a trace could have changed, by identity and by value.

    Tensors are kept in the result, so that no id can be another object's later.
    """
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        found[f"{prefix} itself"] = (id(module), id(module.__dict__), _entries(module.__dict__))
        for name, value in module.__dict__.items():
            found[f"{prefix} {name}"] = _entries(value)
    held: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False))}
    held |= dict(model.named_buffers(remove_duplicate=False))
    held |= {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor)
    }
    for name, tensor in held.items():
        plain = tensor.detach()
        form = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, type(tensor))
        data = bytes(plain.contiguous().reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""
        found[f"tensor {name}"] = (id(tensor), tensor.data_ptr(), form, _entries(tensor.__dict__), data)
    return found


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), [(key, id(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return id(value), [id(item) for item in value]
    return (id(value), sorted(map(str, value))) if isinstance(value, set) else id(value)


@dataclass
class Traced:
    """A table, and short forms of what it says."""

    table: PlacementTable
    receiver: Receiver

    @property
    def kinds(self) -> list[str]:
        return [item.kind for item in self.table.obstacles]

    @property
    def operators(self) -> list[str]:
        return [item.operator for item in self.table.obstacles]

    @property
    def problems(self) -> list[str]:
        return [problem.kind for problem in coverage_problems([self.table], {}, receiver="it")]

    @property
    def casts(self) -> set[tuple[str, ...]]:
        return {item.casts for item in self.table.placements}

    def proven(self) -> bool:
        """No problem, and every element where an oracle with real tensors finds it."""
        assert compare_with_oracle(self.receiver, self.table) == ()
        return not self.problems


def sources_of(tensors: Mapping[str, Tensor]) -> tuple[TracedSource, ...]:
    return tuple(
        TracedSource(name, name, tuple(tensor.shape), dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    )


@pytest.fixture
def trace() -> Callable[..., Traced]:
    """Traces `load(model, weights)`; the model must be afterwards what it was before, bit by bit."""

    def run(
        model: nn.Module,
        load: Callable[[nn.Module, dict[str, Tensor]], object],
        sources: Mapping[str, Tensor] | Iterable[TracedSource],
        **options: Any,
    ) -> Traced:
        described = sources_of(sources) if isinstance(sources, dict) else tuple(sources)  # type: ignore[arg-type]
        receiver = Receiver(model, lambda pairs: load(model, dict(pairs)), KEY, **options)
        before = fingerprint(model)
        table = trace_call(receiver, described, style="plain")
        after = fingerprint(model)
        assert [name for name in before if before[name] != after.get(name)] == []
        assert after.keys() == before.keys()
        return Traced(table, receiver)

    return run
