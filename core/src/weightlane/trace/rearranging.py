"""Operators that give a source's own elements back, in another view, copy, dtype or order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from weightlane.packing import dtype_name
from weightlane.trace.element_numbers import ElementNumbers, TooManyElementsError
from weightlane.trace.stand_ins import COMPUTED, MIXED, StandIn, aten, stand_ins_in

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHARING = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_COPYING = {
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    aten.detach_copy.default,
    aten.alias_copy.default,
    aten._pin_memory.default,
}
_BY_SHAPE = {aten._unsafe_view.default, aten._reshape_alias.default, aten._reshape_copy.default}
# This says where in memory its elements are: true of what the loader sees, not of where it came from.
_BY_MEMORY = {aten.as_strided.default}
_OTHER_VALUES = {"_conj", "_neg_view", "view_as_real", "view_as_complex", "real", "imag"}
_LISTS = {"cat", "concat", "stack"}
_ORDERS = {
    "index_select",
    "flip",
    "roll",
    "gather",
    "index",
    "repeat",
    "take_along_dim",
    "permute_copy",
    "view_copy",
    "expand_copy",
    "slice_copy",
    "select_copy",
    "transpose_copy",
    "t_copy",
    "unbind_copy",
    "split_copy",
    "_unsafe_index",
}


_WAYS: dict[int, str] = {}  # by identity: operators are never taken down, and their own hash is slow


def _way(operator: torch._ops.OpOverload) -> str:
    """How an operator gives elements back; "" if it does not."""
    if operator in _SHARING:
        return "share"
    if operator in _COPYING:
        return "copy"
    if operator in _BY_SHAPE:
        return "by shape"
    if operator in _BY_MEMORY:
        return "by memory"
    other = operator is aten.view.dtype or operator._schema.name.rpartition("::")[2] in _OTHER_VALUES
    return "view" if operator.is_view and not other else ""


class Rearranging:
    """For one run over sources of the given numbers of elements."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.numbers = ElementNumbers(sizes)

    def elements(
        self,
        operator: torch._ops.OpOverload,
        item: StandIn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of a view, copy or cast of `item`; None if the operator is none of them."""
        way = _WAYS.get(id(operator))
        if way is None:
            way = _WAYS[id(operator)] = _way(operator)
        if way == "view" or (way == "by memory" and not item.copied):
            return self._view(operator, item, args, kwargs)
        if way == "share":
            return item.like(item.geometry, item if item.copied else None)
        if way == "copy":
            return _copy(item, kwargs)
        return self._view(aten.view.default, item, args[:2], {}) if way == "by shape" else None

    def _view(
        self,
        operator: torch._ops.OpOverload,
        item: StandIn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        layouts: Any = None
        if item.copied:
            # Raises where the loader's own view would.
            layouts = operator(item.reported(), *args[1:], **kwargs)
        try:
            seen = operator(item.geometry, *args[1:], **kwargs)
        except RuntimeError:
            if not item.copied:
                raise
            numbered = self._numbered(item)  # such as the flat view of the copy of a transposed tensor
            if numbered is None:
                return None
            item, seen = numbered, operator(numbered.geometry, *args[1:], **kwargs)
        if isinstance(seen, torch.Tensor):
            return item.like(seen, layouts) if seen.dtype == item.geometry.dtype else None
        shown = layouts or [None] * len(seen)
        return [item.like(view, layout) for view, layout in zip(seen, shown, strict=True)]

    def _numbered(self, item: StandIn) -> StandIn | None:
        if item.source == COMPUTED:
            return item.like(torch.empty(item.shape, dtype=item.geometry.dtype, device="meta"))
        try:
            geometry = self.numbers.of(item.source, item.geometry).contiguous()
        except TooManyElementsError:
            return None
        return _mixed(item, geometry, item.origins)

    def rearranged(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of putting elements in another order; None if the operator does anything else.

        Only what is rearranged may be a stand-in: an index that comes from a source is a value.
        """
        name = operator._schema.name.rpartition("::")[2]
        if (name not in _LISTS and name not in _ORDERS) or operator._overloadname == "dtype":
            return None  # `view_copy` to another dtype takes the bits for other values
        given = stand_ins_in(args, kwargs)
        data = list(args[0]) if name in _LISTS else [args[0]]
        if len(given) != len(data) or not all(isinstance(item, StandIn) for item in data):
            return None
        if any(item.source == COMPUTED for item in given) or len({item.casts for item in given}) > 1:
            return None

        def numbered(item: Any) -> Any:
            if isinstance(item, StandIn):
                return _laid_out_as(item, self.numbers.of(item.source, item.geometry))
            return item.cpu() if isinstance(item, torch.Tensor) else item

        kept = {key: value for key, value in kwargs.items() if key not in ("device", "dtype")}
        try:
            result = operator(*tree_map(numbered, args), **tree_map(numbered, kept))
        except (RuntimeError, IndexError, TooManyElementsError):
            return None
        origins = tuple(dict.fromkeys(number for item in given for number in item.origins))
        return tree_map(lambda made: _mixed(given[0], made, origins), result)


def _laid_out_as(item: StandIn, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers with the strides of `item`, which those of the result hang on: a loader may see by them."""
    if numbers.stride() == item.stride():
        return numbers
    made = torch.empty_strided(item.shape, item.stride(), dtype=numbers.dtype)
    # Where a step is 0, all along it is one element.
    once = tuple(slice(None, 1) if not step else slice(None) for step in item.stride())
    made[once].copy_(numbers[once])
    return made


def _copy(item: StandIn, kwargs: dict[str, Any]) -> StandIn:
    layout = None
    if kwargs.get("memory_format") or not item.geometry.is_contiguous() or item.geometry.storage_offset():
        layout = _layout(item, kwargs.get("memory_format") or torch.preserve_format)
    return cast(item, kwargs.get("dtype") or item.dtype, layout)


def _layout(item: StandIn, form: torch.memory_format) -> torch.Tensor:
    """A tensor without data as a copy of `item` lies in memory.

    The frequent cases are decided here: torch's own answer first imports a second's worth of modules.
    """
    strides = item.stride()
    if form is torch.preserve_format and _dense(item.shape, strides):
        return torch.empty_strided(item.shape, strides, dtype=item.dtype, device="meta")
    in_order = all(outer >= inner > 0 for outer, inner in itertools.pairwise((*strides, 1)))
    if form is torch.contiguous_format or (form is torch.preserve_format and in_order):
        return torch.empty(item.shape, dtype=item.dtype, device="meta")
    return torch.empty_like(item.reported(), memory_format=form)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without a gap and without an overlap."""
    reach = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1
    ):
        if stride != reach:
            return False
        reach *= size
    return True


def cast(item: StandIn, dtype: torch.dtype, layout: torch.Tensor | None = None) -> StandIn:
    """Its elements, passed through a dtype."""
    name = dtype_name(dtype)
    casts = item.casts if item.casts[-1] == name else (*item.casts, name)
    return StandIn.make(
        item.geometry, item.source, dtype, casts, item.dispatcher, item.origins, item.operator, layout
    )


def _mixed(model: StandIn, geometry: torch.Tensor, origins: tuple[int, ...]) -> StandIn:
    return StandIn.make(geometry, MIXED, model.dtype, model.casts, model.dispatcher, origins)
