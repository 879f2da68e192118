"""The run as one JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightlane.demo.messages import Closing, StepReport
from weightlane.demo.settings import LIMITS, Limits

if TYPE_CHECKING:
    from weightlane.demo.session import Record


class Document(msgspec.Struct, frozen=True):
    """What `--json` prints. `reasons` is empty for a run that passed."""

    verdict: str
    reasons: tuple[str, ...]
    trainer: str
    rollout: str
    mode: str
    architecture: str
    parameters: int
    plan: str
    limits: Limits
    steps: tuple[StepReport, ...]
    closing: Closing | None
    seconds: float
    report: str


def document_of(record: Record) -> Document:
    """The document of a run."""
    return Document(
        verdict=record.verdict.word,
        reasons=record.verdict.reasons,
        trainer=record.settings.trainer,
        rollout=record.settings.rollout,
        mode=record.settings.mode,
        architecture=record.connected.architecture,
        parameters=record.connected.parameters,
        plan=record.connected.plan,
        limits=LIMITS,
        steps=tuple(record.steps),
        closing=record.closing,
        seconds=record.seconds,
        report=str(record.settings.report),
    )
