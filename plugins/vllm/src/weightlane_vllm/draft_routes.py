"""Where the tensors of one stream go that the model's own loader is not handed: a drafter, and buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "draft."
"""Before the name of each tensor that the drafter alone holds, as in vLLM's own records; in an export, before
the drafter's checkpoint name where the model has a tensor of that name too."""


@dataclass(frozen=True, slots=True)
class DraftRoutes:
    """What of a load goes to a drafter, by the name that travels.

    `names` gives what the drafter's loader is handed for it. `alone` are names that the model's own loader is
    not handed.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    alone: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LoadRoutes:
    """Where a load goes that the model's own loader is not handed, by the name that travels.

    `buffers` are written in place, each by its name under the root of both models.
    """

    buffers: Mapping[str, str] = field(default_factory=dict)
    draft: DraftRoutes = DraftRoutes()

    @property
    def reach_the_drafter(self) -> bool:
        """Whether any of it is written to a drafter: else nothing of that is touched."""
        return bool(self.draft.names) or any(name.startswith(PREFIX) for name in self.buffers.values())

    def with_those(self, other: LoadRoutes) -> LoadRoutes:
        """Both: several lanes may have traced a load, each with its own tensors."""
        return LoadRoutes(
            {**self.buffers, **other.buffers},
            DraftRoutes({**self.draft.names, **other.draft.names}, self.draft.alone | other.draft.alone),
        )
