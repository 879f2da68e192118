"""One run of the demo: processes up, reports in, verdict out, processes down."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from weightlane.demo.engines import EngineStart, RunningEngine, own_python, start_engine
from weightlane.demo.messages import Closing, Connected, LastProbs, ModelReady, StepReport, Task
from weightlane.demo.model import LORA_RANK
from weightlane.demo.ranks import start_trainer_ranks
from weightlane.demo.settings import LIMITS, RANKS, lesson_for
from weightlane.demo.verdict import Verdict, broken, judge
from weightlane.errors import ProtocolError, WeightlaneError
from weightlane.front.socket_folder import socket_folder
from weightlane.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightlane.demo.ranks import TrainerRanks
    from weightlane.demo.settings import DemoSettings, Lesson

_Message = TypeVar("_Message")

_IMPORT_SECONDS = 300.0
_CONNECT_SECONDS = 240.0
_STEP_SECONDS = 300.0
_FINISH_SECONDS = 30.0


class View(Protocol):
    """Whoever shows a run while it goes on."""

    def status(self, text: str) -> None:
        """What is being done now."""

    def connected(self, connected: Connected) -> None:
        """The lane stands."""

    def step(self, step: StepReport) -> None:
        """One more step."""


@dataclass(slots=True)
class Record:
    """What a run has reported so far."""

    settings: DemoSettings
    connected: Connected
    steps: list[StepReport] = field(default_factory=list)
    probs: LastProbs = field(default_factory=lambda: LastProbs((), ()))
    closing: Closing | None = None
    verdict: Verdict = field(default_factory=lambda: broken("The run has not ended."))
    seconds: float = 0.0


def run_demo(settings: DemoSettings, view: View) -> Record:
    """Runs the demo as `settings` say; every process that it started is gone when it returns or raises.

    A run that breaks after the lane was connected is a record with the verdict FAIL and its cause.

    Raises:
        WeightlaneError: the run did not get as far as a connected lane.
    """
    started = time.monotonic()
    lesson = lesson_for(settings.model, settings.mode)
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        record, ranks, engine = _connect(stack, settings, lesson, folder, view)
        try:
            _follow(record, ranks, view)
            ranks.finish(seconds=_FINISH_SECONDS)
            record.verdict = judge(record.steps, record.closing, LIMITS, expected_steps=settings.steps)
        except WeightlaneError as error:
            record.verdict = broken(_cause(error, engine))
        view.status("ending all processes")
    record.seconds = time.monotonic() - started
    return record


def _connect(
    stack: ExitStack, settings: DemoSettings, lesson: Lesson, folder: Path, view: View
) -> tuple[Record, TrainerRanks, RunningEngine]:
    """Ranks first, since they import while the engine starts; then the engine; then the lane."""
    tiny = folder / "model"
    view.status(f"starting {RANKS} trainer ranks")
    ranks = stack.enter_context(
        start_trainer_ranks(RANKS, folder, make_model=None if settings.model else tiny, seed=lesson.seed)
    )
    if settings.model is None:
        _expect(ranks.next_report("importing torch and transformers", seconds=_IMPORT_SECONDS), ModelReady)
    model = (settings.model or tiny).absolute()
    view.status(f"starting the rollout engine ({settings.rollout})")
    engine = stack.enter_context(_engine(settings, model, folder))
    view.status("connecting the lane")
    ranks.give(
        Task(
            trainer=settings.trainer,
            rollout=settings.rollout,
            mode=settings.mode,
            model=str(model),
            url=engine.url,
            steps=settings.steps,
            sync_each_step=settings.sync_each_step,
            lesson=lesson,
        )
    )
    if settings.model is not None:
        _expect(ranks.next_report("importing torch and transformers", seconds=_IMPORT_SECONDS), ModelReady)
    connected = _expect(ranks.next_report("connecting the lane", seconds=_CONNECT_SECONDS), Connected)
    view.connected(connected)
    return Record(settings, connected), ranks, engine


@contextmanager
def _engine(settings: DemoSettings, model: Path, folder: Path) -> Iterator[RunningEngine]:
    if settings.url:
        yield RunningEngine(settings.url)
        return
    python = settings.rollout_python or own_python()
    rank = LORA_RANK if settings.mode == Mode.ADAPTER.value else 0
    start = EngineStart(settings.rollout, model, python, folder, lora_rank=rank)
    with start_engine(start) as engine:
        yield engine


def _follow(record: Record, ranks: TrainerRanks, view: View) -> None:
    while record.closing is None:
        step = len(record.steps) + 1
        steps = record.settings.steps
        doing = f"step {step} of {steps}" if step <= steps else "the closing check"
        view.status(doing)
        message = ranks.next_report(f"in {doing}", seconds=_STEP_SECONDS)
        if isinstance(message, StepReport):
            record.steps.append(message)
            view.step(message)
        elif isinstance(message, LastProbs):
            record.probs = message
        else:
            record.closing = _expect(message, Closing)


def _cause(error: WeightlaneError, engine: RunningEngine) -> str:
    words = engine.last_words()
    return f"{error}\nThe end of the engine's log:\n{words}" if words else str(error)


def _expect(message: object, kind: type[_Message]) -> _Message:
    if not isinstance(message, kind):
        raise ProtocolError(
            f"Trainer rank 0 reported {type(message).__name__} where {kind.__name__} was due.",
            "The processes of the demo are not of one weightlane version.",
            "Install the same weightlane for all of them.",
        )
    return message
