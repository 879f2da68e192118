"""What a trainer loads for a sync stays loaded until its stream was read to its end, and goes away once.

The trainer here loses its values when it is offloaded, so that whatever is read too late is seen.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_trainer import FakeLoadingStream, FakeLoadingTrainer
from local_engines import BOUNDS, FakeMortalEngine, weights_of

import weightlane as wl
from weightlane import hook_errors, sync_run
from weightlane.errors import ExportError, WeightlaneError
from weightlane.registry import Registry, get_registry
from weightlane.torch_trainer.unchanged import Unchanged
from weightlane.transports.inprocess import InprocessSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from weightlane.contexts import StreamContext
    from weightlane.lane import Lane
    from weightlane.program import TrainerLifecycle
    from weightlane.stream import ExportStream


class FakeOffloadingStream(FakeLoadingStream):
    """Notes each bucket and its own end; offloaded, its trainer holds zeros."""

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        for bucket in super().__iter__():
            self._plugin.notes.append("bucket")
            yield bucket
        self._plugin.notes.append("end")

    def offload(self) -> None:
        super().offload()
        for tensor in self._context.export.model.values():
            tensor.zero_()


class FakeOffloadingTrainer(FakeLoadingTrainer):
    def __init__(self) -> None:
        super().__init__([])
        self.stream = self._made  # type: ignore[assignment]

    def _made(self, context: StreamContext) -> FakeOffloadingStream:
        return FakeOffloadingStream(context, self)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.trainer = FakeOffloadingTrainer()
        self.engine = FakeMortalEngine(str(folder))
        self.wanted = weights_of(folder)
        self.weights = {name: tensor.clone() for name, tensor in self.wanted.items()}

    def lane(self) -> Lane:
        return wl.connect(
            trainer=wl.trainer("loading", model=self.weights),
            rollout=[wl.rollout("reference", engine=self.engine)],
            bounds=BOUNDS,
            bucket_bytes=16 << 10,
        )

    def largest_served(self) -> float:
        return max(float(tensor.abs().max()) for tensor in self.engine.model.state_dict().values())

    def train(self) -> None:
        """New values, in every tensor."""
        for name, tensor in self.weights.items():
            tensor.copy_(self.wanted[name]).add_(1.0)


@pytest.fixture
def bench(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    get_registry()
    bench = Bench(model_folder)
    registry = Registry().load()
    registry.register(bench.trainer, name="loading")
    monkeypatch.setattr("weightlane.connect_procedure.get_registry", lambda: registry)
    return bench


@contextmanager
def offloaded_at_once(
    stream: ExportStream, lifecycle: TrainerLifecycle, agree: Callable[[Any], None]
) -> Iterator[None]:
    """The defect: the clean-up runs when the stream was made, not when it was read."""
    stream.offload()  # type: ignore[attr-defined]
    yield


@pytest.mark.requirement("R7")
def test_it_is_offloaded_once_and_after_the_stream_was_at_its_end(bench: Bench) -> None:
    with bench.lane() as lane:
        for version in (1, 2):
            bench.train()
            lane.sync(version)
            notes, buckets = bench.trainer.notes, len(lane.plan().buckets)
            assert buckets > 2
            assert notes == ["onload", *["bucket"] * buckets, "end", "offload"]
            assert not any(tensor.any() for tensor in bench.weights.values())
            assert bench.largest_served() > 1.0
            del notes[:]


@pytest.mark.requirement("R7")
def test_a_bucket_that_is_asked_for_after_the_offload_is_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_run, "loaded", offloaded_at_once)
    with bench.lane() as lane:
        bench.train()
        with pytest.raises(
            ExportError, match=r"asked of plugin .*loading .* after its trainer had been offl"
        ):
            lane.sync(1)
    assert bench.trainer.notes == ["offload"]


def test_control_without_the_rules_zeros_are_served(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sync delivers where its trainer is offloaded too early: the symptom of the defect."""
    monkeypatch.setattr(sync_run, "loaded", offloaded_at_once)
    monkeypatch.setattr(hook_errors._Memory, "offloaded", property(lambda _: False, lambda _, value: None))
    monkeypatch.setattr(Unchanged, "require", lambda *_: None)
    with bench.lane() as lane:
        bench.train()
        lane.sync(1)
    served = {
        name: tensor for name, tensor in bench.engine.model.state_dict().items() if name in bench.weights
    }
    assert served
    assert not any(torch.any(tensor) for tensor in served.values())


@pytest.mark.requirement("R4", part="the offload")
@pytest.mark.requirement("R7")
def test_a_move_that_fails_offloads_once_and_nothing_is_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: Any) -> None:
        raise OSError("the cable is out")

    with bench.lane() as lane:
        bench.train()
        with monkeypatch.context() as broken:
            broken.setattr(InprocessSink, "put", cut)
            with pytest.raises((WeightlaneError, OSError), match="the cable is out"):
                lane.sync(1)
        assert bench.trainer.notes.count("offload") == 1
        assert bench.engine.version is None
        bench.train()
        lane.sync(2)
        assert bench.largest_served() > 1.0
