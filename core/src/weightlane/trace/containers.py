"""What a module's dictionaries, lists and sets hold, so that it can be put back into the very same ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set)


@dataclass(frozen=True, slots=True)
class Contents:
    """`held` is what `container` held: a copy one level deep."""

    container: Any
    held: Any

    def put_back(self) -> None:
        """Empties the container and fills it anew, in the same order."""
        self.container.clear()
        if isinstance(self.container, list):
            self.container.extend(self.held)
        else:
            self.container.update(self.held)


def note_contents(module: nn.Module) -> list[Contents]:
    """Of a module's attributes and of each container among them (`_parameters`, `_modules`, a cache)."""
    own = module.__dict__
    within = [Contents(value, copied(value)) for value in own.values() if type(value) in _CONTAINERS]
    return [Contents(own, dict(own)), *within]


def copied(value: Any) -> Any:
    """A dict, list or set one level deep; anything else itself."""
    return value.copy() if type(value) in _CONTAINERS else value
