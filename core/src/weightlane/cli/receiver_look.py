"""What is known of a receiver before anything is sent to it: traced, assumed from a snapshot, or neither."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from weightlane.trace.contract_making import contract_from_tables
from weightlane.trace.explain import Known
from weightlane.trace.patterns import numbered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.checkpoint_folder import CheckpointFolder
    from weightlane.errors import Problem
    from weightlane.receiver import NameEntry
    from weightlane.registry import Selected
    from weightlane.trace.contract import Contract
    from weightlane.trace.table import PlacementTable
    from weightlane.types import Coverage

Basis: TypeAlias = Literal["live engine", "model built here", "snapshot", "static rules"]
"""What an answer rests on, best first."""


@dataclass(frozen=True, slots=True)
class Look:
    """One receiver, and what a checkpoint would meet there.

    Attributes:
        receiver: how messages call it.
        engine_version: as facts tell it.
        selected: the backend that was chosen.
        basis: what all of this rests on.
        coverage: as a plan would call it; `reason` says why it is not proven.
        checkpoint: the folder; None where only a snapshot was asked for.
        entries: where each tensor of the checkpoint goes.
        dropped: reasons by name of what would not be sent.
        problems: all that speaks against a plan.
        tables: one per worker, where a loader was run.
        contract: what the tables show, or the snapshot.
        transport: what a lane from this process would use; "" where no engine runs.
    """

    receiver: str
    engine_version: str
    selected: Selected
    basis: Basis
    coverage: Coverage
    reason: str
    tensor_parallel: int
    lora: bool
    checkpoint: CheckpointFolder | None = None
    entries: tuple[NameEntry, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    tables: tuple[PlacementTable, ...] = ()
    contract: Contract | None = None
    notes: tuple[str, ...] = ()
    transport: str = ""

    @property
    def shown(self) -> Contract | None:
        """What the tables show, or what the snapshot says of names that the checkpoint has."""
        if self.tables or self.contract is None or self.checkpoint is None:
            return contract_from_tables(self.tables, self.dropped) if self.tables else self.contract
        held = {numbered(spec.name).pattern for spec in self.checkpoint.manifest.tensors}
        lines = tuple(line for line in self.contract.lines if line.source in held)
        return msgspec.structs.replace(self.contract, lines=lines)

    @property
    def style(self) -> str:
        """The style of the names that travel; "" where it is not known."""
        if self.tables:
            return self.tables[0].style
        return self.contract.style if self.contract else ""

    def known(self) -> Known:
        """What `explain` may rest on."""
        return Known(
            receiver=self.receiver,
            tensors=self.checkpoint.manifest.tensors if self.checkpoint else (),
            dropped=self.dropped,
            tables=self.tables,
            contract=self.contract,
            lora=self.lora,
        )
