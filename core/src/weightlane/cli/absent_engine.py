"""Looks at an engine that does not run: its model built here without data, else its snapshot, else rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weightlane.checkpoint_folder import CheckpointFolder, read_checkpoint_folder
from weightlane.cli.receiver_look import Look
from weightlane.contexts import MapNamesContext, TraceModelContext
from weightlane.errors import ContractError, EngineError
from weightlane.messages import WireTensor
from weightlane.pins import assume_variable
from weightlane.plan_problems import mapped_problems
from weightlane.receiver import WorkerDescription
from weightlane.selection import select
from weightlane.trace.asking import sources_to_trace, tied_away
from weightlane.trace.assumed import assumed_entries, assumed_from, assumed_problems
from weightlane.trace.contract_files import find_contract
from weightlane.trace.entries import entries_from_table
from weightlane.trace.plan_verdict import table_problems
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightlane.cli.built_tables import BuiltTables, TablesOf
    from weightlane.cli.receiver_look import Basis
    from weightlane.errors import Problem
    from weightlane.facts import EngineFacts
    from weightlane.receiver import ExpectedTensor, NameEntry
    from weightlane.registry import Registry, Selected
    from weightlane.trace.contract import Contract
    from weightlane.trace.table import PlacementTable
    from weightlane.types import Coverage


@dataclass(frozen=True, slots=True)
class AbsentEngine:
    """The engine that is asked about, and how it would run."""

    engine: str
    tensor_parallel: int
    lora: bool


@dataclass(frozen=True, slots=True)
class _Case:
    """What every way of looking needs."""

    registry: Registry
    wish: AbsentEngine
    facts: EngineFacts
    selected: Selected
    checkpoint: CheckpointFolder
    expected: tuple[ExpectedTensor, ...]
    notes: tuple[str, ...]

    @property
    def receiver(self) -> str:
        return f"{self.facts.engine} {self.facts.version}"

    @property
    def dropped(self) -> dict[str, str]:
        return tied_away(self.checkpoint.manifest, self.expected)

    @property
    def sources(self) -> tuple[WireTensor, ...]:
        tensors = self.checkpoint.manifest.tensors
        if not self.expected:
            return tuple(WireTensor(spec.name, spec.shape, spec.dtype) for spec in tensors)
        return sources_to_trace(self.checkpoint.manifest, self.expected)


def look_at_absent(registry: Registry, wish: AbsentEngine, model: Path, tables_of: TablesOf) -> Look:
    """What the checkpoint in `model` would meet in an engine of the version that is here, or stated.

    Args:
        registry: of this process.
        wish: the engine.
        model: the checkpoint's folder.
        tables_of: how tables are come by where the engine is installed, see `built_tables`.

    Raises:
        UsageError: the folder is no checkpoint.
        SelectionError: no backend fits the engine, or its version is not known.
        HookError: the plugin failed while it built or traced the model.
    """
    checkpoint = read_checkpoint_folder(model)
    facts = registry.collect_facts(wish.engine)
    selected = select(registry, "rollout", wish.engine, facts)
    expected, notes = _expected(model)
    case = _Case(registry, wish, facts, selected, checkpoint, expected, (*selected.notes, *notes))
    untraced = Untraced(f"{wish.engine} is not installed here, so its loader cannot be run")
    if facts.source == "installed":
        context = TraceModelContext(
            selected.descriptor, facts, str(model), case.sources, wish.tensor_parallel, wish.lora
        )
        built = tables_of(registry, selected, context)
        answer = _of_this_version(built.tables, facts)
        if not isinstance(answer, Untraced):
            return _traced(case, built, answer)
        untraced = answer
    snapshot = find_contract(
        selected.descriptor,
        facts.version,
        checkpoint.architecture,
        tensor_parallel=wish.tensor_parallel,
        lora=wish.lora,
    )
    if isinstance(snapshot, Untraced):
        return _by_rules(case, f"{untraced.reason}; {snapshot.reason}")
    return _assumed(case, snapshot, untraced.reason)


def _of_this_version(
    tables: tuple[PlacementTable, ...] | Untraced, facts: EngineFacts
) -> tuple[PlacementTable, ...] | Untraced:
    """The tables, unless they are of another version than the one that the user states."""
    if isinstance(tables, Untraced):
        return tables
    traced = tables[0].key.engine_version
    if traced.partition("+")[0] == facts.version.partition("+")[0]:
        return tables
    return Untraced(
        f"{facts.engine} {traced} is installed here and {facts.version} is stated, so that its loader cannot "
        f"be run; unset {assume_variable(facts.engine)} to ask the one that is installed"
    )


def look_at_snapshot(registry: Registry, wish: AbsentEngine, architecture: str) -> Look:
    """What the snapshot says, without a checkpoint.

    Raises:
        ContractError: there is none.
    """
    facts = registry.collect_facts(wish.engine)
    selected = select(registry, "rollout", wish.engine, facts)
    found = find_contract(
        selected.descriptor,
        facts.version,
        architecture,
        tensor_parallel=wish.tensor_parallel,
        lora=wish.lora,
    )
    if isinstance(found, Untraced):
        raise ContractError(f"Nothing is known of {architecture}: {found.reason}.")
    receiver, reason = f"{facts.engine} {facts.version}", assumed_from(found)
    return Look(
        receiver,
        facts.version,
        selected,
        "snapshot",
        "assumed",
        reason,
        wish.tensor_parallel,
        wish.lora,
        contract=found,
    )


def _expected(model: Path) -> tuple[tuple[ExpectedTensor, ...], tuple[str, ...]]:
    from weightlane.checkpoint import expected_tensors_of_config

    try:
        return expected_tensors_of_config(model), ()
    except EngineError as error:
        # The engine may know an architecture that transformers does not; what is lost is told.
        return (), (f"Tied and missing tensors are not looked for: {error.what}",)


def _traced(case: _Case, built: BuiltTables, tables: tuple[PlacementTable, ...]) -> Look:
    manifest, dropped = case.checkpoint.manifest, case.dropped
    entries = entries_from_table(manifest, tables[0], dropped)
    problems = _static_problems(case, entries)
    named = {item.subject for item in problems}
    problems += table_problems(tables, manifest, entries, receiver=case.receiver, named=named)
    how = f"traced on the model of {case.receiver}, built here without data; no engine was asked"
    if built.kept_in is not None:
        how += f"; the tables are those of an earlier call, kept in {built.kept_in} (--fresh traces anew)"
    return _look(
        replace(case, notes=(*case.notes, built.note)) if built.note else case,
        "model built here",
        "assumed",
        how,
        entries,
        problems,
        tables=tables,
    )


def _assumed(case: _Case, contract: Contract, why: str) -> Look:
    dtype = case.facts.launch_arguments.get("dtype", "")
    entries = assumed_entries(contract, case.checkpoint.manifest, case.dropped, dtype=dtype)
    problems = _static_problems(case, entries)
    named = {item.subject for item in problems}
    found = assumed_problems(contract, entries, receiver=case.receiver)
    problems += [item for item in found if item.subject not in named]
    reason = f"{assumed_from(contract)}; {why}"
    return _look(case, "snapshot", "assumed", reason, entries, problems, contract=contract)


def _by_rules(case: _Case, why: str) -> Look:
    worker = WorkerDescription(
        worker=0,
        workers=case.wish.tensor_parallel,
        host="",
        process_id=0,
        incarnation="",
        expected=case.expected,
        facts=case.facts,
    )
    context = MapNamesContext(case.selected.descriptor, case.facts, case.checkpoint.manifest, worker)
    entries = case.registry.call_map_names(case.selected, context)
    if case.wish.lora:
        why += "; static rules are those of an engine with LoRA off, whose names may be others"
    return _look(case, "static rules", "untraced", why, entries, _static_problems(case, entries))


def _static_problems(case: _Case, entries: Sequence[NameEntry]) -> list[Problem]:
    return mapped_problems(case.checkpoint.manifest, entries, case.expected or None, receiver=case.receiver)


def _look(
    case: _Case,
    basis: Basis,
    coverage: Coverage,
    reason: str,
    entries: Sequence[NameEntry],
    problems: Sequence[Problem],
    *,
    tables: tuple[PlacementTable, ...] = (),
    contract: Contract | None = None,
) -> Look:
    return Look(
        receiver=case.receiver,
        engine_version=case.facts.version,
        selected=case.selected,
        basis=basis,
        coverage=coverage,
        reason=reason,
        tensor_parallel=case.wish.tensor_parallel,
        lora=case.wish.lora,
        checkpoint=case.checkpoint,
        entries=tuple(entries),
        dropped={entry.canonical: entry.dropped for entry in entries if entry.dropped},
        problems=tuple(dict.fromkeys(problems)),
        tables=tables,
        contract=contract,
        notes=case.notes,
    )
