"""One replica of a plan: where its workers' loaders put what is exported, and everything wrong with that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.adapter_check import check_adapter_tensors
from weightlane.assumptions import AssumptionContext, assumption_for
from weightlane.contexts import MapNamesContext
from weightlane.endpoint import ReadingBackEndpoint
from weightlane.errors import Problem, near_names
from weightlane.plan import wire_tensors
from weightlane.plan_check import left_to_the_trace
from weightlane.plan_problems import dtype_problems, duplicate_names, mapped_problems, tie_problems
from weightlane.trace.asking import ask_for_tables, sources_to_trace
from weightlane.trace.figures import figures_of
from weightlane.trace.plan_verdict import table_problems
from weightlane.trace.table import Untraced
from weightlane.types import Capability, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.manifest import Manifest
    from weightlane.planning import OpenReplica, PlanRequest
    from weightlane.receiver import BeyondExpected, NameEntry
    from weightlane.registry import Registry
    from weightlane.trace.figures import TraceFigures
    from weightlane.trace.table import PlacementTable
    from weightlane.types import Coverage

_RECEIVE: dict[Phase, Capability] = {
    Phase.FULL: Capability.RECEIVE_FULL,
    Phase.MERGED: Capability.RECEIVE_MERGED,
    Phase.BASE: Capability.RECEIVE_BASE,
    Phase.ADAPTER: Capability.RECEIVE_ADAPTER,
}
_NAMED_ALREADY = ("missing-name", "extra-name", "shape")


@dataclass(frozen=True, slots=True)
class MappedReplica:
    """How the exported tensors travel to a replica, and how much is known of where they land.

    `reason` says why nothing is proven, or what is assumed instead; `figures` are of the tables, if any.
    `tables` are kept where a sync through requests is read back with them.
    """

    entries: tuple[NameEntry, ...]
    problems: tuple[Problem, ...] = ()
    coverage: Coverage = "untraced"
    reason: str = ""
    figures: TraceFigures | None = None
    tables: tuple[PlacementTable, ...] = ()


def map_replica(
    registry: Registry, request: PlanRequest, manifest: Manifest, replica: OpenReplica
) -> MappedReplica:
    """Asks the replica's workers, has its plugin map the names, and checks both.

    Raises:
        WeightlaneError: an engine that was asked for its tables and failed.
    """
    refused = _capability_problem(replica, manifest.phase)
    if refused is not None:
        return MappedReplica((), (refused,))
    where = f"{replica.facts.engine} at {replica.endpoint.address}"
    worker = replica.workers[0]
    sources = sources_to_trace(manifest, worker.expected, worker.beyond)
    answer = ask_for_tables(replica, manifest, sources, request.open_seconds)
    tables = () if isinstance(answer, Untraced) else answer
    per_worker = _entries_per_worker(registry, manifest, replica, tables)
    entries = per_worker[0]
    misaligned = _misaligned(entries, manifest, replica)
    if misaligned is not None:
        return MappedReplica((), (misaligned,))
    problems = _static_problems(manifest, entries, replica, where)
    if tables:
        problems = left_to_the_trace(problems, worker.beyond)
        named = {problem.subject for problem in problems if problem.kind in _NAMED_ALREADY}
        problems += table_problems(tables, manifest, entries, receiver=where, named=named)
        problems += _left_without(problems, worker.beyond)
    else:
        problems += _without_target(entries, replica, where)
    if len({table.style for table in tables}) < 2:
        problems += _differing_workers(per_worker, replica)
    if isinstance(answer, Untraced):
        return _unproven(answer, manifest, entries, problems, replica, where)
    return MappedReplica(
        entries, tuple(problems), "proven", figures=figures_of(tables), tables=_kept(tables, request, replica)
    )


def _left_without(problems: Sequence[Problem], beyond: BeyondExpected | None) -> list[Problem]:
    """Beside what nothing would write of whoever takes more than the checkpoint."""
    left = (
        item.kind == "uncovered" and beyond and item.subject.startswith(beyond.prefix) for item in problems
    )
    if beyond is None or not any(left):
        return []
    return [Problem("uncovered", beyond.taker, "not all that it holds is exported", beyond.left_out)]


def _kept(
    tables: tuple[PlacementTable, ...], request: PlanRequest, replica: OpenReplica
) -> tuple[PlacementTable, ...]:
    """An agent holds its own table; of a replica that is read back from here, it must be held here."""
    reads = request.read_back != "never" and isinstance(replica.endpoint, ReadingBackEndpoint)
    return tables if reads else ()


def _unproven(
    answer: Untraced,
    manifest: Manifest,
    entries: tuple[NameEntry, ...],
    problems: Sequence[Problem],
    replica: OpenReplica,
    where: str,
) -> MappedReplica:
    context = AssumptionContext(
        replica.selected.descriptor, replica.facts, manifest, replica.workers, entries, where
    )
    assumed = assumption_for(context)
    if isinstance(assumed, Untraced):
        return MappedReplica(entries, tuple(problems), reason=f"{answer.reason}; {assumed.reason}")
    reason = f"{assumed.source}; {answer.reason}"
    named = {problem.subject for problem in problems}
    more = [problem for problem in assumed.problems if problem.subject not in named]
    return MappedReplica(assumed.entries, (*problems, *more), "assumed", reason)


def _capability_problem(replica: OpenReplica, phase: Phase) -> Problem | None:
    descriptor = replica.selected.descriptor
    if _RECEIVE[phase] in descriptor.capabilities:
        return None
    return Problem(
        "capability",
        descriptor.name,
        f"backend {descriptor.name} of {replica.selected.distribution} cannot receive mode {phase.value}",
        f"It can: {', '.join(sorted(item.value for item in descriptor.capabilities))}.",
    )


def _entries_per_worker(
    registry: Registry, manifest: Manifest, replica: OpenReplica, tables: Sequence[PlacementTable]
) -> list[tuple[NameEntry, ...]]:
    descriptor = replica.selected.descriptor
    # A server that is one worker to us may have several inside, which gave a table each.
    of_worker = tables if len(tables) == len(replica.workers) else [*tables[:1]] * len(replica.workers)
    return [
        tuple(
            registry.call_map_names(
                replica.selected,
                MapNamesContext(
                    descriptor, replica.facts, manifest, worker, of_worker[number] if of_worker else None
                ),
            )
        )
        for number, worker in enumerate(replica.workers)
    ]


def _misaligned(entries: Sequence[NameEntry], manifest: Manifest, replica: OpenReplica) -> Problem | None:
    names = [spec.name for spec in manifest.tensors]
    if [entry.canonical for entry in entries] == names:
        return None
    return Problem(
        "map-names",
        replica.selected.descriptor.name,
        f"its map has {len(entries)} entries for {len(names)} exported tensors, or another order",
        f"Report this to {replica.selected.distribution}.",
    )


def _differing_workers(per_worker: Sequence[tuple[NameEntry, ...]], replica: OpenReplica) -> list[Problem]:
    return [
        Problem("map-names", mine.canonical, f"worker {worker.worker} wants it otherwise than worker 0")
        for worker, other in zip(replica.workers[1:], per_worker[1:], strict=True)
        for mine, theirs in zip(per_worker[0], other, strict=True)
        if (mine.wire, mine.dtype, mine.dropped) != (theirs.wire, theirs.dtype, theirs.dropped)
    ]


def _static_problems(
    manifest: Manifest, entries: tuple[NameEntry, ...], replica: OpenReplica, where: str
) -> list[Problem]:
    expected = replica.workers[0].expected
    if manifest.adapter is None:
        problems = mapped_problems(manifest, entries, expected, receiver=where)
    else:
        sent = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
        problems = duplicate_names(sent)
        problems += check_adapter_tensors(sent, manifest.adapter, expected, receiver=where)
        problems += dtype_problems(manifest, entries)
    problems += tie_problems(manifest, entries, expected, where)
    return problems


def _without_target(entries: Sequence[NameEntry], replica: OpenReplica, where: str) -> list[Problem]:
    """Where nothing was traced: names that the static rules lead nowhere."""
    expected = {item.name for item in replica.workers[0].expected}
    live = [tensor.name for tensor in replica.workers[0].live]
    return [
        Problem(
            "no-target",
            entry.canonical,
            f"the checkpoint of {where} has it, but no live tensor takes it",
            near=near_names(entry.canonical, live),
        )
        for entry in entries
        if not entry.dropped and not entry.targets and entry.rule == "unknown" and entry.wire in expected
    ]
