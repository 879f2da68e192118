#!/usr/bin/env python3
"""The support matrix, from the descriptors of installed plugins and from nothing else.

`conf.py` writes it whenever the site is built. By hand: `python docs/support_matrix.py` prints it.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rst_tables import list_table, literal

from weightlane.discovery import STRICT_VARIABLE
from weightlane.probes import always_viable
from weightlane.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.registry import Selected

HEAD = ("Engine, plugin", "Role", "Era", "Versions", "Capabilities", "Transports", "Probe")


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One backend for one era of one engine. `probe` is a name, or "" where the range alone decides."""

    engine: str
    role: str
    era: str
    versions: str
    capabilities: tuple[str, ...]
    transports: tuple[str, ...]
    probe: str
    probe_asks: str
    distribution: str
    summary: str


def installed_registry() -> Registry:
    """What is installed, untouched by the variables and pins of whoever builds the site.

    Raises:
        PluginError: a plugin cannot be used; a matrix without it would look whole.
    """
    return Registry(environ={STRICT_VARIABLE: "1"}, project=Path(__file__).parent).load()


def matrix_rows(registry: Registry) -> tuple[MatrixRow, ...]:
    """A row for every backend of every active plugin: trainers first, then by engine and era."""
    rows = [_row(item) for item in registry.backends()]
    return tuple(sorted(rows, key=lambda row: (row.role != "trainer", row.engine, row.era, row.distribution)))


def matrix_page(rows: Sequence[MatrixRow]) -> str:
    """The rows as a table, and what each backend and each probe says of itself."""
    parts = [list_table(HEAD, [_cells(row) for row in rows], css_class="wide")]
    summaries = [
        f"* {literal(row.engine)}, era {literal(row.era)}: {row.summary.rstrip('.')}."
        for row in rows
        if row.summary
    ]
    probes = {row.probe: f"* {literal(row.probe)}: {row.probe_asks}" for row in rows if row.probe_asks}
    for title, lines in (
        ("In the backends' own words:", summaries),
        ("What the probes ask:", [probes[name] for name in sorted(probes)]),
    ):
        if lines:
            parts.append("\n".join([title, "", *lines, ""]))
    return "\n".join(parts)


def _row(item: Selected) -> MatrixRow:
    descriptor = item.descriptor
    # A probe may be any callable: a partial or an instance has no name of its own.
    probe = getattr(descriptor.probe, "__qualname__", type(descriptor.probe).__qualname__)
    by_range = descriptor.probe is always_viable
    return MatrixRow(
        engine=descriptor.engine,
        role=descriptor.role,
        era=descriptor.era,
        versions=", ".join(sorted(map(str, descriptor.versions), reverse=True)),
        capabilities=tuple(sorted(item.value for item in descriptor.capabilities)),
        transports=tuple(item.value for item in descriptor.transports),
        probe="" if by_range else probe,
        probe_asks="" if by_range else " ".join((inspect.getdoc(descriptor.probe) or "").split()),
        distribution=item.distribution,
        summary=descriptor.summary,
    )


def _cells(row: MatrixRow) -> tuple[str, ...]:
    return (
        f"| {literal(row.engine)}\n| {literal(row.distribution)}",
        row.role,
        literal(row.era),
        literal(row.versions) or "any",
        "\n".join(f"| {literal(name)}" for name in row.capabilities) or "none",
        "\n".join(f"| {literal(name)}" for name in row.transports) or "\u2013",
        literal(row.probe) or "none: the range decides",
    )


if __name__ == "__main__":
    sys.stdout.write(matrix_page(matrix_rows(installed_registry())))
