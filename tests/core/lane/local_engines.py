"""Reference engines of the test's own process, and ways to hurt them; the lane has one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

import weightlane as wl
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.errors import EngineDeadError, SyncError
from weightlane.reference.engine import ReferenceEngine
from weightlane.reference.worker import ReferenceWorker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from weightlane.lane import Lane

BOUNDS = replace(DEFAULT_BOUNDS, connect=20.0, start=10.0, finish=10.0, bucket=10.0, lost_after=3.0)
PROMPT = [[1, 2, 3]]


class FakeMortalEngine(ReferenceEngine):
    """A reference engine that can seem dead, be started anew, and lose a tensor on its way to the loader."""

    dead = False
    loses_a_tensor = False

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        if self.dead:
            raise EngineDeadError(f"The engine {self.model_path} is gone.", "It was killed.", "Restart it.")
        return super().call_workers(message, timeout_seconds)

    def start_anew(self) -> None:
        """What a restart leaves: another incarnation, no agent, no plan, no version."""
        vars(self).pop("_weightlane_agent", None)
        self._version = self._writing = None
        self.worker = ReferenceWorker(self)
        self.dead = False


class FakeForgetfulWorker(ReferenceWorker):
    """Claims one tensor fewer than it was handed, as a loader that skips a name does; or breaks half-way."""

    forgets = False
    loads_left = -1
    """How many buckets it still loads before it breaks; -1: all."""

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        if self.loads_left == 0:
            raise SyncError("The loader broke.")
        self.loads_left -= 1
        return super().load_weights(tensors) - int(self.forgets and len(tensors) > 0)


def engines(folder: Path, count: int = 2) -> list[FakeMortalEngine]:
    return [FakeMortalEngine(str(folder)) for _ in range(count)]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def change(weights: dict[str, Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.02)


def lane_to(weights: dict[str, Tensor], targets: Sequence[ReferenceEngine], **options: Any) -> Lane:
    return wl.connect(
        trainer=wl.trainer("torch", model=weights),
        rollout=[wl.rollout("reference", engine=engine) for engine in targets],
        bounds=BOUNDS,
        bucket_bytes=64 << 10,
        **options,
    )


def versions_held(targets: Sequence[ReferenceEngine]) -> list[int | None]:
    return [engine.version for engine in targets]


def held_equal(engine: ReferenceEngine, weights: dict[str, Tensor]) -> bool:
    live = engine.model.state_dict()
    return all(torch.equal(live[name], tensor) for name, tensor in weights.items())
