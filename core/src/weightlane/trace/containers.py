"""What a module's dictionaries, lists and sets hold, so that it can be put back into the very same ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_CONTAINERS = (dict, list, set)  # and what derives from them: some libraries give modules dicts of their own


@dataclass(frozen=True, slots=True)
class Contents:
    """`held` is what `container` held: a plain copy one level deep."""

    container: Any
    held: Any

    def put_back(self) -> None:
        """Empties the container and fills it anew, in the same order."""
        if isinstance(self.container, list):
            list.__setitem__(self.container, slice(None), self.held)
        elif isinstance(self.container, set):
            set.clear(self.container)
            set.update(self.container, self.held)
        else:
            self.container.clear()  # an ordered one keeps its order beside what a plain dict does
            for key, value in self.held.items():
                self.container[key] = value


@dataclass(frozen=True, slots=True)
class Kind:
    """A module and the class that it had."""

    module: nn.Module
    held: type

    def put_back(self) -> None:
        """Sets it where it is another one now."""
        if type(self.module) is not self.held:
            self.module.__class__ = self.held


def note_contents(module: nn.Module, noted: set[int]) -> list[Contents | Kind]:
    """Of a module's attributes and of each container among and in them (`_parameters`, `_modules`, a cache).

    Args:
        module: whose class is noted too.
        noted: ids of containers that were met before; those met now are added.
    """
    own = module.__dict__
    found: list[Contents | Kind] = [Kind(module, type(module)), Contents(own, dict(own))]
    waiting = list(own.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, _CONTAINERS) and id(value) not in noted:
            noted.add(id(value))
            found.append(Contents(value, plain(value)))
            # Long ones are caches of numbers or names, and to look for more in them would take long.
            if len(value) <= _MOST_ENTRIES:
                waiting.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is tuple and len(value) <= _MOST_ENTRIES:
            waiting.extend(value)
    return found


_MOST_ENTRIES = 1 << 12


def plain(container: Any) -> Any:
    """A plain dict, list or set of what it holds."""
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    return kind(container)


def copied(value: Any) -> Any:
    """A dict, list or set one level deep, of its own type where that is a plain one; anything else itself."""
    return value.copy() if type(value) in _CONTAINERS else value
