"""What traced loads of one model have told of names: kept while that model stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import Problem
from weightlane_vllm.draft_routes import LoadRoutes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.trace.table import PlacementTable


class TracedNames:
    """Names that the loader of one incarnation was handed in traces, and where their elements went.

    Several lanes may have had a load traced, each with its own tensors.
    """

    def __init__(self) -> None:
        self._incarnation = ""
        self._targets: dict[str, tuple[str, ...]] = {}
        self._wire_of: dict[str, str] = {}
        self._routes = LoadRoutes()

    def add(self, incarnation: str, table: PlacementTable, routes: LoadRoutes) -> None:
        """Takes in a table and what went past the model's loader; another incarnation is forgotten."""
        if incarnation != self._incarnation:
            self._incarnation, self._targets, self._wire_of = incarnation, {}, {}
            self._routes = LoadRoutes()
        self._routes = self._routes.with_those(routes)
        self._targets.update(table.targets_of())
        self._wire_of.update({source.canonical: source.wire for source in table.sources})

    def known(self, incarnation: str) -> bool:
        """Whether any load of this incarnation was traced."""
        return bool(self._wire_of) and incarnation == self._incarnation

    def routes(self, incarnation: str) -> LoadRoutes:
        """Where names go that its loader is not handed; none where untraced."""
        return self._routes if incarnation == self._incarnation else LoadRoutes()

    def targets_of(self, canonical: str) -> tuple[str, ...]:
        """Receiver tensors that a canonical name was seen to reach on this worker."""
        return self._targets.get(canonical, ())

    def unreached(self, names: Sequence[str], *, receiver: str) -> list[Problem]:
        """One problem per wire name that no traced load was handed."""
        handed = set(self._wire_of.values())
        problems: list[Problem] = []
        for name in names:
            if name in handed:
                continue
            instead = self._wire_of.get(name)
            known = f"; {instead} is what it takes in its place" if instead else ""
            problems.append(
                Problem(
                    "unreached",
                    name,
                    f"no traced load of {receiver} was handed this name{known}",
                    "Connect again, so that the plan is made from a trace of this very model.",
                )
            )
        return problems
