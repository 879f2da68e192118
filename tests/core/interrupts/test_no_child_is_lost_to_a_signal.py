"""A signal that comes while a child process is being started: the child is known, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.demo import interpreter, ranks
from weightlane.front import process as front_process
from weightlane.interrupts import interrupts_held
from weightlane.testing import ranks as rank_groups
from weightlane_sglang import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SLEEP = "import time; time.sleep(60)"


def starts_trainer_ranks(folder: Path) -> None:
    with ranks.start_trainer_ranks(2, folder, make_model=None, seed=0):
        raise AssertionError("the signal came before")


def starts_a_front(folder: Path) -> None:
    command = [sys.executable, "-c", _SLEEP]
    address = f"unix:{folder}/front"
    with front_process.start_front_process(command, address, log=folder / "log", ready_timeout_seconds=30):
        raise AssertionError("the signal came before")


def starts_a_server(folder: Path) -> None:
    settings = launch.ServerSettings(Path(sys.executable), folder, "cpu")
    with launch.launched_server(settings, log=folder / "log"):
        raise AssertionError("the signal came before")


def asks_an_interpreter(folder: Path) -> None:
    interpreter.has_gpu(Path(sys.executable), "vllm")


def starts_a_rank_group(folder: Path) -> None:
    with rank_groups.RankGroup(["-c", _SLEEP], 2):
        raise AssertionError("the signal came before")


STARTERS = [
    (starts_trainer_ranks, ranks),
    (starts_a_front, front_process),
    (starts_a_server, launch),
    (asks_an_interpreter, interpreter),
    (starts_a_rank_group, rank_groups),
]


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    """As on a terminal; a shell that starts something in the background has it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ctrl-C arrives right after every fork; gives the children. None of them outlives the test."""
    children: list[int] = []

    class InterruptedPopen(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self.pid)
            signal.raise_signal(signal.SIGINT)

        def __del__(self, _warn: Any = None) -> None:
            """Nothing: that a lost child is not warned of is the point."""

    monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)
    yield children
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def lives(process: int) -> bool:
    """Whether it is there, as a zombie too."""
    return Path(f"/proc/{process}").exists()


@pytest.mark.parametrize(("start", "module"), STARTERS)
def test_the_child_is_ended_before_the_interrupt_goes_on(
    tmp_path: Path, forked: list[int], start: Callable[[Path], None], module: Any
) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    (child,) = forked
    assert not lives(child)


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("start", "module"), STARTERS)
def test_control_without_holding_the_signal_the_child_is_lost(
    tmp_path: Path,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[Path], None],
    module: Any,
) -> None:
    monkeypatch.setattr(module, "interrupts_held", contextlib.nullcontext)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    (child,) = forked
    assert lives(child)


def test_signals_are_delivered_after_the_block_once_each() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert arrived == []
        assert arrived == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_of_the_block_is_kept_as_the_interrupt_s_context() -> None:
    def fail_while_interrupted() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail_while_interrupted()
    assert isinstance(caught.value.__context__, ValueError)


def test_ignored_signals_stay_ignored_and_handlers_come_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_pass_through() -> None:
    handler = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def hold() -> None:
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [handler]
