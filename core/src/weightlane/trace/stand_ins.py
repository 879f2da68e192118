"""Stand-ins: tensors that know where their elements come from and hold none of them.

A stand-in reports the shape, strides, dtype and device of a checkpoint tensor, or of what a loader made of it
by views, copies and casts. `geometry` holds its true place in the source: a tensor on the meta device whose
storage stands for the source, or, where elements of one or several sources were rearranged (`cat`, `flip`),
a tensor of element numbers. Dispatch follows the tensor, not the thread, so that loaders may use threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from weightlane.trace.dispatch import Dispatcher

aten = torch.ops.aten

MIXED = -1
"""The source number of a stand-in whose geometry holds element numbers."""

COMPUTED = -2
"""That of one whose values are calculated: it can be passed on, and never placed."""


class StandIn(torch.Tensor):
    """See the module. `origins` are the sources that it comes from, `operator` what computed it, if any."""

    geometry: Tensor
    source: int
    casts: tuple[str, ...]
    dispatcher: Dispatcher
    origins: tuple[int, ...]
    operator: str

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
    ) -> StandIn:
        """A tensor of the geometry's shape and strides, and of the dispatcher's device."""
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn,
            geometry.shape,
            strides=geometry.stride(),
            storage_offset=geometry.storage_offset(),
            dtype=dtype,
            device=dispatcher.device,
            requires_grad=False,
        )
        made.geometry, made.source, made.casts, made.dispatcher = geometry, source, casts, dispatcher
        made.origins, made.operator = origins or (source,), operator
        return made

    def like(self, geometry: Tensor) -> StandIn:
        """A rearrangement of this one's elements."""
        return StandIn.make(
            geometry, self.source, self.dtype, self.casts, self.dispatcher, self.origins, self.operator
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({self.dispatcher.describe(self)}, shape={tuple(self.shape)}, dtype={self.dtype})"

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
    found = [item for item in args if isinstance(item, StandIn)]
    if found and not kwargs:
        return found
    return [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, StandIn)]


def written_by(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The tensors among the arguments that an operator writes to, by its own schema."""
    written: list[Tensor] = []
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            several = value if isinstance(value, (list, tuple)) else (value,)
            written.extend(item for item in several if isinstance(item, torch.Tensor))
    return written


def on_geometry(
    operator: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    form: Callable[[StandIn], Tensor],
) -> Any:
    """Runs an operator with each stand-in replaced by a form of its geometry."""

    def replaced(item: Any) -> Any:
        return form(item) if isinstance(item, StandIn) else item

    return operator(*tree_map(replaced, args), **tree_map(replaced, kwargs))
