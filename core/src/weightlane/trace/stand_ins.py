"""Stand-ins: tensors that know where their elements come from and hold none of them.

A stand-in reports the shape, strides, dtype and device of a checkpoint tensor, or of what a loader made of it
by views, copies and casts. `geometry` holds its true place in the source: a tensor on the meta device whose
storage stands for the source, or, where elements of one or several sources were rearranged (`cat`, `flip`),
a tensor of element numbers. The strides of the two differ where a loader copied a strided view. Dispatch
follows the tensor, not the thread, so that loaders may use threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from weightlane.trace.dispatch import Dispatcher

aten = torch.ops.aten
_T = TypeVar("_T")

MIXED = -1
"""The source number of a stand-in whose geometry holds element numbers."""

COMPUTED = -2
"""That of one whose values are calculated: it can be passed on, and never placed."""


class StandIn(torch.Tensor):
    """See the module. `origins` are the sources that it comes from, `operator` what computed it, if any.

    `shares`: it is computed, and lies in the memory of its source nevertheless. `copied`: it says to be laid
    out otherwise than its elements lie in their source.
    """

    geometry: Tensor
    source: int
    casts: tuple[str, ...]
    dispatcher: Dispatcher
    origins: tuple[int, ...]
    operator: str
    shares: bool
    copied: bool

    # Straight to dispatch: torch functions need no wrapping here, and it halves the time of a trace.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(
        geometry: Tensor,
        source: int,
        dtype: torch.dtype,
        casts: tuple[str, ...],
        dispatcher: Dispatcher,
        origins: tuple[int, ...] = (),
        operator: str = "",
        layout: Tensor | None = None,
    ) -> StandIn:
        """A tensor of the dispatcher's device and of the geometry's shape, laid out as `layout` or as it."""
        if torch.is_inference_mode_enabled():
            # Else it would be an inference tensor, which no view of an ordinary one may be.
            with torch.inference_mode(False):
                return StandIn.make(geometry, source, dtype, casts, dispatcher, origins, operator, layout)
        seen = geometry if layout is None else layout
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn,
            seen.shape,
            strides=seen.stride(),
            storage_offset=seen.storage_offset(),
            dtype=dtype,
            device=dispatcher.device,
            requires_grad=False,
        )
        made.geometry, made.source, made.casts, made.dispatcher = geometry, source, casts, dispatcher
        made.origins, made.operator, made.shares = origins or (source,), operator, False
        made.copied = layout is not None and (
            (layout.stride(), layout.storage_offset()) != (geometry.stride(), geometry.storage_offset())
        )
        return made

    def like(self, geometry: Tensor, layout: Tensor | None = None) -> StandIn:
        """A rearrangement of this one's elements."""
        own = (self.source, self.dtype, self.casts, self.dispatcher, self.origins, self.operator)
        made = StandIn.make(geometry, *own, layout)
        made.shares = self.shares
        return made

    def reported(self) -> Tensor:
        """A tensor without data, laid out as this one says that it is."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({self.dispatcher.describe(self)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> StandIn:
        return self  # nothing can change it

    # Ways to a value that dispatch does not see. A loader may swallow what they raise: hence the record.

    def item(self) -> float:
        """A token, see `values`."""
        return self.dispatcher.token(self)

    def _needed(self, *_: Any, **__: Any) -> NoReturn:
        self.dispatcher.value_needed(self, "bool, float, int or index")

    def _data_needed(self, *_: Any, **__: Any) -> NoReturn:
        self.dispatcher.value_needed(self, "numpy, tolist or data_ptr")

    __bool__ = __float__ = __int__ = __index__ = __complex__ = _needed
    numpy = tolist = data_ptr = __array__ = __dlpack__ = __reduce_ex__ = _data_needed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operator: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first = stand_ins_in(args, kwargs or {})[0]
        return first.dispatcher.with_stand_ins(operator, args, kwargs or {})


def stand_ins_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StandIn]:
    """All stand-ins among the arguments of an operator, also inside lists."""
    found = [item for item in args if isinstance(item, (StandIn, list, tuple))]
    if kwargs:
        found += [item for item in kwargs.values() if isinstance(item, (StandIn, list, tuple))]
    return _of_kind(StandIn, found)


def tensors_in(items: Iterable[Any]) -> list[Tensor]:
    """All tensors among them, also inside lists."""
    return _of_kind(torch.Tensor, items)


def _of_kind(kind: type[_T], items: Iterable[Any]) -> list[_T]:
    found: list[_T] = []
    for item in items:
        if isinstance(item, kind):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += _of_kind(kind, item)
    return found


def written_by(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The tensors among the arguments that an operator writes to, by its own schema."""
    written: list[Tensor] = []
    for position, name in _written_arguments(operator):
        value = args[position] if position < len(args) else kwargs.get(name)
        several = value if isinstance(value, (list, tuple)) else (value,)
        written.extend(item for item in several if isinstance(item, torch.Tensor))
    return written


# By identity: operators are never taken down, and their own hash is slow.
_WRITTEN: dict[int, tuple[tuple[int, str], ...]] = {}


def _written_arguments(operator: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    known = _WRITTEN.get(id(operator))
    if known is None:
        known = _WRITTEN[id(operator)] = tuple(
            (position, argument.name)
            for position, argument in enumerate(operator._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    return known
