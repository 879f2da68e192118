"""Values of stand-ins that a loader asks for: tokens, which may be put into a target and nothing else.

A token refuses every way of Python's to look at it. Code in C looks past that (`math.isnan`), so a load that
asks for values is run again with tokens of other forms: what it does may not differ.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.stand_ins import StandIn

# No loader fills a target with such a number; a double holds it and its next billions exactly.
_FIRST = 1 << 40
_NAN = 0xFFF8 << 48  # negative, so that its magnitude is another


class ValueNeededError(RuntimeError):
    """The loader asked for a value that no stand-in has; raised into it, since no answer would be true."""


class TokenForm(Protocol):
    """Which numbers are tokens."""

    def value_of(self, number: int) -> float:
        """The token of this number."""

    def number_of(self, value: float, given: int) -> int | None:
        """Which of the `given` tokens a value is; None if it is none."""


class LargeTokens:
    """Numbers that no checkpoint holds."""

    def value_of(self, number: int) -> float:
        """The token of this number."""
        return float(_FIRST + number)

    def number_of(self, value: float, given: int) -> int | None:
        """Which of them a value is."""
        number = value - _FIRST
        return int(number) if 0 <= number < given and number == int(number) else None


class NanTokens:
    """Values that are no number, each with bits of its own."""

    def value_of(self, number: int) -> float:
        """The token of this number."""
        value: float = struct.unpack("<d", struct.pack("<Q", _NAN + number + 1))[0]
        return value

    def number_of(self, value: float, given: int) -> int | None:
        """Which of them a value is."""
        number: int = struct.unpack("<Q", struct.pack("<d", value))[0] - _NAN - 1
        return number if 0 <= number < given else None


class InfiniteTokens:
    """All alike, so that only where one is written can be told: the one that was given last is taken."""

    def value_of(self, number: int) -> float:  # noqa: ARG002 - of the protocol
        """The token of any number."""
        return math.inf

    def number_of(self, value: float, given: int) -> int | None:
        """Which of them a value may be."""
        return given - 1 if given and value == math.inf else None


class Token(float):
    """What `item()` of a stand-in gives: a number that stands for the value and must only be written."""

    __slots__ = ("refuse",)
    refuse: Callable[[], NoReturn]

    def _refused(self, *_: Any) -> NoReturn:
        self.refuse()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused
    __bool__ = __int__ = __float__ = __trunc__ = __floor__ = __ceil__ = __round__ = _refused
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refused
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __divmod__ = _refused
    is_integer = as_integer_ratio = hex = _refused
    __hash__ = float.__hash__


class Tokens:
    """The tokens of one run, in one form; loaders may use threads."""

    def __init__(self, form: TokenForm) -> None:
        self._form = form
        self._items: list[StandIn] = []
        self._used: set[int] = set()
        self._lock = threading.Lock()  # bounded by what is done under it: one look-up or append

    def give(self, item: StandIn, refuse: Callable[[], NoReturn]) -> Token:
        """A new one for an element of a source; `refuse` is called when it is looked at."""
        with self._lock:
            self._items.append(item)
            token = Token(self._form.value_of(len(self._items) - 1))
        token.refuse = refuse
        return token

    def use(self, value: object) -> StandIn | None:
        """The stand-in whose token `value` is, if it is one; it counts as written from now on."""
        if type(value) not in (int, float):
            return None
        number = self._form.number_of(float(value), len(self._items))  # type: ignore[arg-type]
        if number is None:
            return None
        self._used.add(number)
        return self._items[number]

    def given(self) -> list[StandIn]:
        """All that the loader asked for."""
        return list(self._items)

    def unused(self) -> list[StandIn]:
        """Those whose token was written nowhere: a decision may hang on it."""
        return [item for number, item in enumerate(self._items) if number not in self._used]


def may_be_token(value: float) -> bool:
    """Whether a number may be a token that was rounded to a dtype, or overflowed in it."""
    return not abs(value) < _FIRST / 2
