"""What is assumed of a replica that cannot be traced: the contract snapshot of its version, if one fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.errors import UsageError
from weightlane.trace.assumed import assumed_entries, assumed_from, assumed_problems
from weightlane.trace.contract_files import find_contract
from weightlane.trace.table import Untraced
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.errors import Problem
    from weightlane.facts import EngineFacts
    from weightlane.manifest import Manifest
    from weightlane.receiver import NameEntry, WorkerDescription
    from weightlane.trace.contract import Contract
    from weightlane.types import BackendDescriptor


@dataclass(frozen=True, slots=True)
class AssumptionContext:
    """An untraced replica: what it is, what is to be sent to it, and why it could not be traced.

    `entries` are those of the static rules, whose dropped tensors stay dropped.
    """

    descriptor: BackendDescriptor
    facts: EngineFacts
    manifest: Manifest
    workers: tuple[WorkerDescription, ...]
    entries: tuple[NameEntry, ...]
    receiver: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a snapshot says.

    `source` names it for people, `entries` are the name map by it, `problems` what it refuses of the plan.
    """

    source: str
    entries: tuple[NameEntry, ...]
    problems: tuple[Problem, ...] = ()


def assumption_for(context: AssumptionContext) -> Assumption | Untraced:
    """The assumption that fits, or why there is none: then the replica stays `untraced`.

    Raises:
        ContractError: the snapshot is damaged.
    """
    if context.manifest.phase is Phase.ADAPTER:
        return Untraced("a snapshot tells of a loader, which an adapter does not pass through")
    contract = snapshot_of(context.descriptor, context.facts, context.workers)
    if isinstance(contract, Untraced):
        return contract
    dropped = {entry.canonical: entry.dropped for entry in context.entries if entry.dropped}
    dtype = context.facts.launch_arguments.get("dtype", "")
    entries = assumed_entries(contract, context.manifest, dropped, dtype=dtype)
    problems = assumed_problems(contract, entries, receiver=context.receiver)
    return Assumption(assumed_from(contract), entries, tuple(problems))


def snapshot_of(
    descriptor: BackendDescriptor, facts: EngineFacts, workers: Sequence[WorkerDescription]
) -> Contract | Untraced:
    """The snapshot of a live engine's version, architecture and layout, or why there is none.

    Raises:
        ContractError: it is damaged.
    """
    architecture = architecture_of(facts)
    if not architecture:
        return Untraced("its architecture is not known, so no snapshot can be looked for")
    return find_contract(
        descriptor,
        facts.version,
        architecture,
        tensor_parallel=max(facts.parallel.tensor, len(workers)),
        lora=facts.launch_arguments.get("enable_lora", "").lower() == "true",
    )


def architecture_of(facts: EngineFacts) -> str:
    """The model class that an engine runs, by its own word or its checkpoint folder; "" if neither tells."""
    told = facts.launch_arguments.get("architecture", "").partition(",")[0]
    folder = Path(facts.model_path)
    if told or not facts.model_path or not folder.is_dir():
        return told
    from weightlane.checkpoint_folder import read_config

    try:
        named = read_config(folder).get("architectures")
    except UsageError:
        return ""
    return str(named[0]) if isinstance(named, list) and named else ""
