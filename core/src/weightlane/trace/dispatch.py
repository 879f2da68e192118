"""What each operator of a loader means while it is traced. Nothing is executed on data.

Rules, in the order in which they are tried:

1. a write into a target: a placement if a stand-in is copied, a fill if a constant is, else an obstacle;
2. a write into anything that is neither a target nor made during the trace: blocked, an obstacle;
3. `item()`: a token that a later `fill_` may give back; any other use would depend on a value;
4. views, copies and casts: the same elements, seen otherwise (`rearranging`);
5. rearrangements (`cat`, `flip`): followed by element numbers (`rearranging`);
6. anything else computes: its result may be passed on, and is an obstacle where it is written.

Source: measured on vLLM 0.27.1 and 0.32, SGLang 0.5.18 and 20 architectures of transformers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from weightlane.packing import dtype_name, torch_dtype
from weightlane.trace.constants import Constants
from weightlane.trace.rearranging import Rearranging, cast
from weightlane.trace.recorder import Recorder, operator_name, storage_key
from weightlane.trace.stand_ins import COMPUTED, MIXED, StandIn, aten, stand_ins_in, tensors_in, written_by
from weightlane.trace.values import LargeTokens, Token, Tokens, ValueNeededError, may_be_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.trace.plain_writes import PlainWrites
    from weightlane.trace.table import ObstacleKind, TracedSource
    from weightlane.trace.values import TokenForm

VALUE = "aten._local_scalar_dense"
_LARGE = LargeTokens()


class Dispatcher:
    """Carries out the rules for one run; `device` is what stand-ins report.

    `threads` are those whose operators without a stand-in are seen too; `parallel`: there were several, and
    `followed` are those that the loader started. `over`: the load has returned, and no rule holds any more.
    `asked` are the sources of which the loader took a value, told when the run is closed.
    """

    def __init__(
        self,
        sources: Sequence[TracedSource],
        recorder: Recorder,
        device: torch.device,
        form: TokenForm = _LARGE,
    ) -> None:
        self.device = device
        self.threads: set[int] = set()
        self.parallel = False
        self.over = False
        self.followed: list[tuple[threading.Thread, PlainWrites]] = []
        self.asked: tuple[int, ...] = ()
        self._sources = sources
        self._recorder = recorder
        self._same = Rearranging([source.elements for source in sources])
        self._tokens = Tokens(form)
        self._constants = Constants()
        self._closed = False
        # Experts are alike by the thousand, and a geometry without data can serve all of one shape. They are
        # made before the load, in which they would count as the loader's own.
        self._geometries = {
            (shape, dtype): torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            for shape, dtype in {(source.shape, source.dtype) for source in sources}
        }

    def stand_in(self, number: int, dtype: torch.dtype) -> StandIn:
        """That of a whole source."""
        source = self._sources[number]
        return StandIn.make(
            self._geometries[source.shape, source.dtype], number, dtype, (source.dtype,), self
        )

    def is_target_without_data(self, tensor: Tensor) -> bool:
        """Whether it is a twin, or a view of one, that holds nothing."""
        return tensor.untyped_storage().device.type == "meta" and storage_key(tensor) in (
            self._recorder.target_of
        )

    def describe(self, item: StandIn) -> str:
        """Where it comes from, for messages."""
        names = ", ".join(self._sources[number].canonical for number in item.origins if number >= 0)
        return f"computed by {item.operator} from {names}" if item.source == COMPUTED else names

    def close(self) -> None:
        """An obstacle for each value that was taken and not put anywhere: a decision may hang on it."""
        self._closed = True
        self.asked = _origins(self._tokens.given())
        for item in self._tokens.unused():
            self._recorder.block("value-dependent", VALUE, item.origins, None)
        # Stand-ins hold this object. A ring through a view and its base is one that no collector can open.
        self._tokens = Tokens(_LARGE)

    def outlived(self, thread: str) -> None:
        """Records a thread that the loader started, which goes on after the load."""
        detail = f"the thread {thread}, which it starts and which goes on when the load has returned"
        self._recorder.block("thread", "", [], None, detail)

    # -- operators without a stand-in -------------------------------------------------------------------

    def without_stand_ins(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs it, unless it would write to what was there before; records what it does to a target."""
        if operator.is_view:
            return operator(*args, **kwargs)
        for tensor in written_by(operator, args, kwargs):
            target = self._recorder.target_of.get(storage_key(tensor))
            if target is not None:
                self._write_constant(operator, target, tensor, args)
            elif self._recorder.was_made(tensor):
                self._constants.forget(tensor)
            else:
                detail = f"a tensor of shape {list(tensor.shape)} that is no parameter or buffer of the model"
                self._recorder.block("foreign", operator_name(operator), [], None, detail)
                return tensor
        result = operator(*args, **kwargs)
        for item in tensors_in((result,)):
            if not isinstance(item, StandIn) and self._recorder.made(item, args, kwargs):
                self._constants.note(operator, args, item)
        return result

    def _write_constant(
        self, operator: torch._ops.OpOverload, target: int, view: Tensor, args: tuple[Any, ...]
    ) -> None:
        value, dtype = _constant(operator, args, view.dtype, self._constants)
        taken = self._tokens.use(value)
        if taken is not None:
            self._copy(cast(taken, dtype), target, view)
        elif value is not None:
            self._recorder.fill(target, view, float(torch.tensor(value, dtype=dtype)))
        else:
            self._recorder.block("computed", operator_name(operator), [], target)

    # -- operators with one -----------------------------------------------------------------------------

    def with_stand_ins(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The rules of this module's head."""
        if self._closed:
            raise ValueNeededError("a loader kept a tensor of a trace that is over; it has no values")
        if threading.get_ident() not in self.threads:
            given = stand_ins_in(args, kwargs)
            self._recorder.block("thread", operator_name(operator), _origins(given), None)
        first = args[0] if args and isinstance(args[0], StandIn) else None
        if first is not None and not operator._schema.is_mutable:
            same = self._same.elements(operator, first, args, kwargs)
            if same is not None:
                return same
        written = written_by(operator, args, kwargs)
        if written:
            for tensor in written:
                self._write(operator, tensor, args, kwargs)
            return written[0] if len(written) == 1 else None
        if operator is aten._local_scalar_dense.default:
            return float.__add__(self.token(args[0]), 0.0)
        if operator is aten.is_pinned.default:
            return False
        rearranged = self._same.rearranged(operator, args, kwargs)
        return self._computed(operator, args, kwargs) if rearranged is None else rearranged

    def _write(
        self, operator: torch._ops.OpOverload, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        copies = operator is aten.copy_.default or operator is aten.fill_.Tensor
        target = None if isinstance(tensor, StandIn) else self._recorder.target_of.get(storage_key(tensor))
        if target is not None and copies and isinstance(args[1], StandIn):
            self._copy(args[1], target, tensor)
            return
        origins = _origins(stand_ins_in(args, kwargs))
        name = operator_name(operator)
        if isinstance(tensor, StandIn):
            if tensor.source == COMPUTED and not tensor.shares:
                self._recorder.block("staged", name, origins, None, f"one made by {tensor.operator}")
                return
            self._recorder.changed_sources.update(number for number in tensor.origins if number >= 0)
            self._recorder.block("changed-source", name, tensor.origins, None)
        elif target is None:
            kind: ObstacleKind = "staged" if self._recorder.was_made(tensor) else "foreign"
            self._recorder.block(kind, name, origins, None, f"a tensor of shape {list(tensor.shape)}")
        else:
            self._recorder.block("computed", name, origins, target)

    def _copy(self, taken: StandIn, target: int, view: Tensor) -> None:
        if taken.source == COMPUTED:
            self._recorder.block("computed", taken.operator, taken.origins, target)
            return
        geometry = taken.geometry if taken.shape == view.shape else taken.geometry.expand(view.shape)
        if taken.source == MIXED:
            for run in self._same.numbers.runs(geometry, view):
                self._recorder.place_run(target, view, run, taken.casts)
        else:
            self._recorder.place(target, view, taken.source, geometry, taken.casts)

    # -- values -----------------------------------------------------------------------------------------

    def token(self, item: StandIn) -> Token:
        """What stands for its value."""
        if item.source == COMPUTED or item.numel() != 1:
            self.value_needed(item, item.operator or VALUE)
        return self._tokens.give(item, lambda: self.value_needed(item, VALUE))

    def value_needed(self, item: StandIn, what: str) -> NoReturn:
        """Records that the loader looks at a value, and stops it there.

        Raises:
            ValueNeededError: always.
        """
        self._recorder.block("value-dependent", item.operator or what, item.origins, None)
        raise ValueNeededError(f"the loader asked by {what} for a value that a stand-in does not have")

    def _computed(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = stand_ins_in(args, kwargs)
        origins = _origins(given)
        name = next((item.operator for item in given if item.operator), "") or operator_name(operator)
        on_meta = {key: value for key, value in kwargs.items() if key != "device"}

        def shape_of(item: Any) -> Any:
            if isinstance(item, StandIn):
                return item.reported()
            return item.to("meta") if isinstance(item, torch.Tensor) else item

        try:
            result = operator(*tree_map(shape_of, args), **tree_map(shape_of, on_meta))
        except (RuntimeError, NotImplementedError) as error:
            self._recorder.block("value-dependent", name, origins, None, str(error).splitlines()[0][:200])
            raise ValueNeededError(f"{name} cannot run without values") from error

        def wrapped(made: Any) -> Any:
            if not isinstance(made, torch.Tensor):
                return made
            item = StandIn.make(made, COMPUTED, made.dtype, (dtype_name(made.dtype),), self, origins, name)
            item.shares = operator.is_view  # of other elements: a write to it is one to its source
            return item

        return tree_map(wrapped, result)


def _origins(given: Sequence[StandIn]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for item in given for number in item.origins if number >= 0))


def _constant(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], own: torch.dtype, known: Constants
) -> tuple[float | None, torch.dtype]:
    """The number that an operator puts into a whole tensor, and the dtype that it has before; or None."""
    value = args[1] if len(args) > 1 else None
    if operator is aten.zero_.default:
        return 0.0, own
    if operator is aten.fill_.Scalar and isinstance(value, (bool, int, float)):
        return float(value), own
    if operator is aten.copy_.default or operator is aten.fill_.Tensor:
        constant = known.of(value)
        if constant is not None:
            return constant
    if operator is aten.fill_.Tensor and isinstance(value, torch.Tensor) and not value.is_meta:
        number = float(value.item())
        return (None if may_be_token(number) else number), value.dtype
    return None, own
