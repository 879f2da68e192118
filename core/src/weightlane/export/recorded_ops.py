"""What a function does to tensors, recorded on stand-ins without data and done again on real tensors.

Where an output is part of one input as it lies there (a slice, a transposition, copies of such), it is kept
as that view. Anything else is kept as the chain of torch's operators that made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


class CannotRecordError(Exception):
    """An operator whose result is more than a function of the stand-ins."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of one input, by stride from an offset, counted in a contiguous one."""

    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def sources(self) -> tuple[int, ...]:
        """The one input."""
        return (self.source,)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The view, of the input itself where it is contiguous."""
        return self.of(tensors[0], self.offset)

    def of(self, tensor: Tensor, offset: int) -> Tensor:
        """The same with another offset: of a tensor that is a part of the input."""
        whole = tensor.contiguous()
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + offset)

    @property
    def reach(self) -> int:
        """How many elements lie between the first and the one after the last."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class _Step:
    function: Any
    arguments: Any
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators in order; values are numbered, the first ones being the `sources`."""

    sources: tuple[int, ...]
    steps: tuple[_Step, ...]
    inputs: tuple[int, ...]
    result: int

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The output, made of tensors in the order of `sources`."""
        values = {number: tensor.contiguous() for number, tensor in zip(self.inputs, tensors, strict=True)}

        def real(item: Any) -> Any:
            return values[item.number] if isinstance(item, _Value) else item

        with torch.no_grad():
            for step in self.steps:
                arguments, keywords = tree_map(real, step.arguments)
                made, _ = tree_flatten(step.function(*arguments, **keywords))
                values.update(zip(step.results, made, strict=True))
        return values[self.result]


@dataclass(frozen=True, slots=True)
class _Value:
    number: int


def record(
    function: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, tuple[int, View | Chain | None, tuple[int, ...], torch.dtype]]:
    """What `function` makes of named tensors.

    Args:
        function: gets stand-ins on the meta device and gives named tensors.
        shapes: shape and dtype of each input, by name.

    Returns:
        For each output its first input's number, how it is made (None: it is that input), its shape and its
        dtype.

    Raises:
        CannotRecordError: an operator writes to a tensor, or makes one that does not depend on the inputs.
    """
    inputs = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    recorder = _Recorder(list(inputs.values()))
    with torch.no_grad(), recorder:
        made = function(dict(inputs))
    return {name: recorder.of(name, tensor) for name, tensor in made.items()}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: list[Tensor] = list(inputs)  # kept, so that ids stay theirs
        self._numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
        self._inputs = len(inputs)
        self._origins: dict[int, tuple[int, Tensor]] = {
            number: (number, tensor) for number, tensor in enumerate(inputs)
        }
        self._steps: dict[int, _Step] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        keywords = kwargs or {}
        if func._schema.is_mutable:
            raise CannotRecordError(f"{func} writes to a tensor")
        flat, _ = tree_flatten((args, keywords))
        taken = [item for item in flat if isinstance(item, torch.Tensor)]
        unknown = [tensor for tensor in taken if id(tensor) not in self._numbers]
        if unknown or not taken:
            raise CannotRecordError(f"{func} takes or makes a tensor that is none of the model's")
        made = func(*args, **keywords)
        results, _ = tree_flatten(made)
        numbers = tuple(self._number(tensor) for tensor in results)
        step = _Step(func, tree_map(self._as_value, (args, keywords)), numbers)
        self._steps.update(dict.fromkeys(numbers, step))
        self._follow(func, args, keywords, taken, numbers)
        return made

    def _number(self, tensor: Tensor) -> int:
        self._values.append(tensor)
        return self._numbers.setdefault(id(tensor), len(self._values) - 1)

    def _as_value(self, item: Any) -> Any:
        return _Value(self._numbers[id(item)]) if isinstance(item, torch.Tensor) else item

    def _follow(self, func: Any, args: Any, keywords: Any, taken: list[Tensor], numbers: Any) -> None:
        """Does the same to what the operand is a view of, where the result is such a view again."""
        origin = self._origins.get(self._numbers[id(taken[0])])
        if len(taken) != 1 or origin is None:
            return
        source, view = origin
        views: list[Any]
        if func is torch.ops.aten.clone.default:
            views = [view]
        elif any(result.alias_info is not None for result in func._schema.returns):
            try:
                views, _ = tree_flatten(
                    func(*tree_map(lambda item: view if item is taken[0] else item, args), **keywords)
                )
            except RuntimeError:  # strides that a view cannot have; the chain says it then
                return
        else:
            return
        for number, found in zip(numbers, views, strict=True):
            self._values.append(found)
            self._origins[number] = (source, found)

    def of(self, name: str, tensor: Tensor) -> tuple[int, View | Chain | None, tuple[int, ...], torch.dtype]:
        """How an output is made."""
        number = self._numbers.get(id(tensor))
        if number is None:
            raise CannotRecordError(f"{name} is made of none of the model's tensors")
        shape = tuple(tensor.shape)
        if number < self._inputs:
            return number, None, shape, tensor.dtype
        origin = self._origins.get(number)
        if origin is not None and tuple(origin[1].shape) == shape:
            source, view = origin
            return source, View(source, shape, view.stride(), int(view.storage_offset())), shape, tensor.dtype
        chain = self._chain(number)
        return chain.sources[0], chain, shape, tensor.dtype

    def _chain(self, result: int) -> Chain:
        needed: dict[int, _Step] = {}
        inputs: set[int] = set()
        todo = [result]
        while todo:
            number = todo.pop()
            if number < self._inputs:
                inputs.add(number)
                continue
            step = self._steps[number]
            if id(step) in needed:
                continue
            needed[id(step)] = step
            todo += [item.number for item in tree_flatten(step.arguments)[0] if isinstance(item, _Value)]
        ordered = tuple(sorted(inputs))
        steps = tuple(sorted(needed.values(), key=lambda step: min(step.results)))
        return Chain(ordered, steps, ordered, result)
