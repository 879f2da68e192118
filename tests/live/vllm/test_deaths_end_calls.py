"""SIGKILL to vLLM's engine core, to a worker and to a trainer rank: all ends, is named, and can go on.

The tests share an address: the engine that one has killed is started there again by the next.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import weightlane as wl
from weightlane import messages
from weightlane.errors import EngineDeadError, EngineError
from weightlane.front.client import FrontEndpoint
from weightlane.testing.parity_run import parity_ranks, run_parity
from weightlane.testing.steps import steps_named
from weightlane_vllm.launch import LoraStart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from weightlane.front.process import FrontProcess
    from weightlane.lane import Lane

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

BACKEND = "weightlane-vllm/vllm@lora-load-weights"  # two eras share the plain name

ENDS_WITHIN = 30.0
SLOW = {"bucket-bytes": 1 << 16, "bucket-seconds": 0.5}
PROMPTS = ((1, 2, 3, 4, 5), (17, 250, 33, 8, 120, 64, 3))
TOKENS = 8


class MortalEngine:
    """A vLLM of two workers at one address, started where none lives there."""

    def __init__(
        self, start: Callable[..., AbstractContextManager[FrontProcess]], model: Path, address: str
    ) -> None:
        self._start, self._model, self._address = start, model, address
        self._alive: tuple[AbstractContextManager[FrontProcess], FrontProcess] | None = None

    def alive(self) -> FrontProcess:
        if self._alive is None:
            started = self._start(self._model, 2, LoraStart(slots=2, rank=8), address=self._address)
            self._alive = (started, started.__enter__())
        return self._alive[1]

    def end(self) -> None:
        """Ends what is left of it."""
        if self._alive is not None:
            self._alive[0].__exit__(None, None, None)
            self._alive = None


@pytest.fixture(scope="module")
def engine(
    start_front: Callable[..., AbstractContextManager[FrontProcess]], tiny_folder: Path
) -> Iterator[MortalEngine]:
    with tempfile.TemporaryDirectory(prefix="wl-") as private:
        mortal = MortalEngine(start_front, tiny_folder, f"unix:{private}/front")
        try:
            yield mortal
        finally:
            mortal.end()


def stat_of(pid: int) -> list[str]:
    """State, parent and what follows of a process, as /proc tells them."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def lives(pid: int) -> bool:
    try:
        return stat_of(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def waits_for_its_first_bucket(lane: Lane) -> messages.Receive:
    """A receive whose ring nobody fills: the case that would wait longest."""
    plan = lane.plan()
    return messages.Receive(
        lane=plan.lane,
        plan_digest=plan.digest(),
        sync=1,
        version=1,
        incarnation=plan.replicas[0].incarnations,
        wait_seconds=200.0,
        lost_after_seconds=200.0,
    )


@pytest.mark.requirement("R64")
def test_a_killed_engine_core_ends_the_long_call_and_its_successor_is_brought_level(
    engine: MortalEngine, tiny_folder: Path, trainer_of: type, adapter_trainer_of: type
) -> None:
    trainer, tuned = trainer_of(tiny_folder), adapter_trainer_of(tiny_folder)
    address = engine.alive().address
    endpoint = FrontEndpoint(address, 60.0)
    workers = endpoint.describe_workers(BACKEND)
    core = int(stat_of(workers[-1].process_id)[1])  # the workers' parent
    rollout = [wl.rollout("vllm", url=address)]
    with (
        wl.connect(
            trainer=wl.trainer("torch", model=tuned.model), rollout=rollout, mode="adapter"
        ) as adapter,
        wl.connect(trainer=wl.trainer("torch", model=trainer.model), rollout=rollout) as lane,
    ):
        adapter.sync(version=1)
        outcome: list[BaseException] = []

        def call() -> None:
            try:
                endpoint.call_workers(messages.encode(waits_for_its_first_bucket(lane)), 250.0)
            except BaseException as error:  # noqa: BLE001 - what it was is asserted below
                outcome.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        time.sleep(2.0)
        assert thread.is_alive(), "the receive was to wait for its first bucket"
        killed = time.monotonic()
        os.kill(core, signal.SIGKILL)
        thread.join(ENDS_WITHIN)
        took = time.monotonic() - killed
        assert not thread.is_alive()
        (error,) = outcome
        assert isinstance(error, EngineDeadError)
        assert str(core) in str(error), "the cause names the process"
        assert took < ENDS_WITHIN
        with pytest.raises(EngineDeadError, match=str(core)):
            endpoint.facts()
        with pytest.raises(EngineError, match=str(core)):
            endpoint.generate([(1, 2, 3)], max_tokens=2)
        engine.end()
        deadline = time.monotonic() + 10.0
        while any(lives(worker.process_id) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [worker.process_id for worker in workers if lives(worker.process_id)]

        # The one that is started in its place holds neither: both lanes send all that it needs.
        assert engine.alive().address == address
        tuned.change(seed=3)
        report = adapter.sync(version=2)
        assert [item.phase.value for item in report.phases] == ["base", "adapter"]
        said = adapter.replicas[0].generate(PROMPTS, max_tokens=TOKENS, adapter=adapter.adapter_ref())
        assert tuned.truth(PROMPTS, TOKENS).distance(said) <= 1e-4
        trainer.change(seed=4)
        lane.sync(version=3)
        said = lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS)
        assert trainer.truth(PROMPTS, TOKENS).distance(said) <= 1e-4


@pytest.mark.requirement("R64")
def test_a_killed_trainer_rank_ends_every_other_and_the_engine_lives_on(
    engine: MortalEngine, tiny_folder: Path
) -> None:
    front = engine.alive()
    # The rank that feeds worker 1.
    with parity_ranks(model=tiny_folder, engine="vllm", url=front.address, ranks=3, options=SLOW) as group:
        group.wait_for_output(1, "MOVED A BUCKET", 200)
        process = group.process_id(1)
        group.kill(1)
        outcomes = group.wait(100)
    steps = steps_named(outcomes, "sync 1")
    assert {step.rank for step in steps} == {0, 2}
    for step in steps:
        assert step.outcome == "error"
        assert str(process) in step.text
        assert step.seconds < ENDS_WITHIN
    run_parity(model=tiny_folder, engine="vllm", url=front.address, ranks=1, syncs=1, seconds=200, options={})


@pytest.mark.requirement("R64")
def test_a_killed_worker_leaves_no_rank_waiting_for_it(engine: MortalEngine, tiny_folder: Path) -> None:
    front = engine.alive()
    victim = FrontEndpoint(front.address, 60.0).describe_workers(BACKEND)[1].process_id
    with parity_ranks(model=tiny_folder, engine="vllm", url=front.address, ranks=2, options=SLOW) as group:
        group.wait_for_output(0, "MOVED A BUCKET", 200)
        os.kill(victim, signal.SIGKILL)
        outcomes = group.wait(100)
    engine.end()
    steps = steps_named(outcomes, "sync 1")
    assert {step.rank for step in steps} == {0, 1}
    for step in steps:
        assert step.outcome == "error"
        assert step.type == "EngineDeadError"
        assert front.address in step.text
        assert str(victim) in step.text
        assert step.seconds < ENDS_WITHIN
