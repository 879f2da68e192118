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


def note_contents(module: nn.Module) -> list[Contents]:
    """Of a module's attributes and of each container among them (`_parameters`, `_modules`, a cache)."""
    own = module.__dict__
    within = [Contents(value, plain(value)) for value in own.values() if isinstance(value, _CONTAINERS)]
    return [Contents(own, dict(own)), *within]


def plain(container: Any) -> Any:
    """A plain dict, list or set of what it holds."""
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    return kind(container)


def copied(value: Any) -> Any:
    """A dict, list or set one level deep, of its own type where that is a plain one; anything else itself."""
    return value.copy() if type(value) in _CONTAINERS else value
