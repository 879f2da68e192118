"""An oracle for placement tables: the engine's own loader, run on real tensors that carry element numbers.

It shares nothing with the stand-ins. Every source element has a number; a dtype that cannot hold it gets it
digit by digit, one run of the loader for each. Real twins stand in the place of the model's tensors, so that
the live ones are neither read nor written. After each run every receiver element is compared with what the
table says of it. One digit is loaded twice, into memory that held another value before, so that an element
that was never written cannot be mistaken for one that was.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightlane.packing import torch_dtype
from weightlane.testing.expected_elements import ExpectedElements
from weightlane.trace.targets import find_targets
from weightlane.trace.twins import twins_in_place, with_data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from weightlane.trace.table import Fill, Placement, PlacementTable
    from weightlane.trace.tracing import Receiver

_LARGEST_BASE = 1 << 20
_OLD_VALUES = (1, 0)  # what memory holds before a run; both fit every dtype


@dataclass(frozen=True, slots=True)
class Difference:
    """Elements of `target` ("" for the load as a whole) that are not what the table says, and the first."""

    target: str
    elements: int
    detail: str


def compare_with_oracle(receiver: Receiver, table: PlacementTable) -> tuple[Difference, ...]:
    """Loads numbered tensors and compares every element of every target with the table.

    Takes the memory of two more models, and two to seven loads. A table with obstacles is held to what it
    claims: its obstacles' targets, and elements that it does not say to be written, are passed over.

    Args:
        receiver: the one that the table was traced from; its model may lie on the meta device.
        table: for these sources and this model.
    """
    oracle = _Oracle(receiver, table)
    for digit, old in oracle.runs():
        with torch.no_grad():
            failure = oracle.compare(digit, old)
        if failure is not None:
            return (failure,)
    return oracle.differences()


class _Oracle:
    def __init__(self, receiver: Receiver, table: PlacementTable) -> None:
        device = next((item.device for item in receiver.model.parameters()), torch.device("cpu"))
        self._device = torch.device("cpu") if device.type == "meta" else device
        self._receiver, self._table = receiver, table
        self._starts = [0, *itertools.accumulate(source.elements for source in table.sources)]
        self._base = _base(table)
        self._placed: dict[int, list[Placement]] = {}
        self._filled: dict[int, list[Fill]] = {}
        for item in table.placements:
            self._placed.setdefault(item.target, []).append(item)
        for fill in table.fills:
            self._filled.setdefault(fill.target, []).append(fill)
        self._wrong: dict[int, tuple[Tensor, str]] = {}

    def runs(self) -> Iterator[tuple[int, int]]:
        """Which digit travels, and what the targets hold before."""
        yield 0, _OLD_VALUES[0]
        yield 0, _OLD_VALUES[1]
        digit = 1
        while self._base**digit < self._starts[-1]:
            yield digit, _OLD_VALUES[0]
            digit += 1

    def compare(self, digit: int, old: int) -> Difference | None:
        """One run of the loader; a Difference where the load as a whole is not the table's."""
        receiver, table = self._receiver, self._table
        with twins_in_place(receiver.model, receiver.loading_form, with_data) as twins:
            tensors = {
                name: item.twin.tensor.detach().as_subclass(torch.Tensor)
                for item in find_targets(receiver, twins)
                for name in item.names
            }
            for target in table.targets:
                if target.name not in tensors:
                    return Difference(target.name, 0, "the model has no such tensor")
            for tensor in tensors.values():
                if tensor.is_floating_point():  # a loader may look into buffers of integers
                    tensor.fill_(old)
            before = {target.name: tensors[target.name].clone() for target in table.targets}
            error = self._load(digit)
            claimed = any(item.kind == "error" for item in table.obstacles)
            if error and not claimed:
                return Difference("", 0, error)
            if claimed and not error:
                return Difference("", 0, "the loader does not raise the error that the table tells of")
            self._judge(digit, before, tensors)
        return None

    def differences(self) -> tuple[Difference, ...]:
        """What all runs together showed, in the order of the targets."""
        return tuple(
            Difference(self._table.targets[number].name, int(wrong.sum()), first)
            for number, (wrong, first) in sorted(self._wrong.items())
        )

    def _load(self, digit: int) -> str:
        handed = (
            (source.wire, self._numbers(number, digit)) for number, source in enumerate(self._table.sources)
        )
        try:
            self._receiver.load(handed)
        except Exception as error:  # noqa: BLE001 - whatever the engine's loader raises is a result
            return f"the loader raised {type(error).__name__}: {str(error)[:500]}"
        return ""

    def _numbers(self, number: int, digit: int) -> Tensor:
        """One digit of each element's number, in the source's shape and dtype."""
        source = self._table.sources[number]
        numbers = torch.arange(self._starts[number], self._starts[number + 1], device=self._device)
        digits = (numbers // self._base**digit) % self._base
        shaped: Tensor = digits.to(torch_dtype(source.dtype)).reshape(source.shape)
        return shaped

    def _judge(self, digit: int, before: dict[str, Tensor], held: dict[str, Tensor]) -> None:
        passed_over = {name for item in self._table.obstacles for name in item.targets}
        numbers: dict[int, Tensor] = {}
        for number, target in enumerate(self._table.targets):
            if target.name in passed_over or not target.elements:
                continue
            expected = ExpectedElements(target, before[target.name])
            for fill in self._filled.get(number, ()):
                expected.fill(fill)
            for item in self._placed.get(number, ()):
                if item.source not in numbers:
                    numbers[item.source] = self._numbers(item.source, digit).reshape(-1)
                expected.place(item, numbers[item.source])
            wrong = expected.wrong(held[target.name], unclaimed=not self._table.obstacles)
            if bool(wrong.any()):
                known, first = self._wrong.get(number, (wrong, ""))
                first = first or expected.explain(wrong, held[target.name], self._table.sources)
                self._wrong[number] = (known | wrong, first)


def _base(table: PlacementTable) -> int:
    """The most values that every dtype of the sources and of what they are cast to holds exactly."""
    names = {source.dtype for source in table.sources}
    names |= {name for item in table.placements for name in item.casts}  # with the targets' own
    return min((_values(torch_dtype(name)) for name in names), default=_LARGEST_BASE)


def _values(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 2
    if dtype.is_floating_point or dtype.is_complex:
        # eps is the step above 1, so that all integers up to 2 / eps are there.
        return max(2, min(_LARGEST_BASE, int(2 / torch.finfo(dtype).eps)))
    return min(_LARGEST_BASE, torch.iinfo(dtype).max)
