"""Values of stand-ins that a loader asks for: tokens, which may be put into a target and nothing else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.stand_ins import StandIn

# No loader fills a target with such a number; a double holds it and its next billions exactly.
_FIRST = 1 << 40


class ValueNeededError(RuntimeError):
    """The loader asked for a value that no stand-in has; raised into it, since no answer would be true."""


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
    """The tokens of one run; loaders may use threads."""

    def __init__(self) -> None:
        self._items: list[StandIn] = []
        self._used: set[int] = set()
        self._lock = threading.Lock()  # bounded by what is done under it: one look-up or append

    def give(self, item: StandIn, refuse: Callable[[], NoReturn]) -> Token:
        """A new one for an element of a source; `refuse` is called when it is looked at."""
        with self._lock:
            self._items.append(item)
            token = Token(_FIRST + len(self._items) - 1)
        token.refuse = refuse
        return token

    def use(self, value: object) -> StandIn | None:
        """The stand-in whose token `value` is, if it is one; it counts as written from now on."""
        if type(value) not in (int, float):
            return None
        number = value - _FIRST  # type: ignore[operator]
        if not (0 <= number < len(self._items) and number == int(number)):
            return None
        self._used.add(int(number))
        return self._items[int(number)]

    def unused(self) -> list[StandIn]:
        """Those whose token was written nowhere: a decision may hang on it."""
        return [item for number, item in enumerate(self._items) if number not in self._used]


def may_be_token(value: float) -> bool:
    """Whether a number may be a token that was rounded to a dtype, or overflowed in it."""
    return not abs(value) < _FIRST / 2
