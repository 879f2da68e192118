"""What the user asked of `connect`, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.adapters import SwapPolicy
    from weightlane.bounds import Bounds
    from weightlane.specs import RolloutSpec, TrainerSpec
    from weightlane.types import (
        MemoryTag,
        MissingPolicy,
        Mode,
        ReadBackPolicy,
        RequestPolicy,
        TransportName,
        VerifyLevel,
    )


@dataclass(frozen=True, slots=True)
class Wishes:
    """The arguments of `connect`, as this rank was given them; `replicas` is empty off the controller."""

    trainer: TrainerSpec
    replicas: tuple[RolloutSpec, ...]
    mode: Mode
    verify: VerifyLevel
    transport: TransportName | None
    bucket_bytes: int
    missing_replicas: MissingPolicy
    release: tuple[MemoryTag, ...]
    bounds: Bounds
    lane: str
    folder: str = ""
    locked: Path | None = None
    read_back: ReadBackPolicy = "first"
    swap: SwapPolicy = "two_slot"
    requests: RequestPolicy | None = None

    def shared(self) -> dict[str, str]:
        """The arguments that must be the same on every rank, as text."""
        return {
            "mode": self.mode.value,
            "verify": self.verify,
            "transport": self.transport.value if self.transport else "None",
            "bucket_bytes": str(self.bucket_bytes),
            "folder": self.folder,
            "missing_replicas": self.missing_replicas,
            "release": ", ".join(self.release) or "()",
            "read_back": self.read_back,
            "swap": self.swap,
            "requests": str(self.requests),
        }
