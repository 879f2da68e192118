"""The driver's bounds, over a stand-in for vLLM's `LLM`; the live tests kill real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from weightlane.errors import EngineDeadError, EngineError
from weightlane.watched_process import WatchedProcess, first_ended
from weightlane_vllm.driver import LlmDriver

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeLlm:
    """What the driver looks at of an `LLM`: its client's resources."""

    def __init__(self, *processes: subprocess.Popen[bytes]) -> None:
        named = [SimpleNamespace(pid=process.pid, name="EngineCore_DP0") for process in processes]
        self.resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=named), engine_dead=False)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(resources=self.resources))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(10)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_call_gives_what_the_engine_gave() -> None:
    driver = LlmDriver(FakeLlm(), name="engine")
    assert driver.run("ask", lambda llm: type(llm).__name__, 5.0) == "FakeLlm"
    driver.close(end_processes=False)


def test_an_engine_error_keeps_its_text() -> None:
    def fail(llm: object) -> None:
        raise RuntimeError("block table is full")

    driver = LlmDriver(FakeLlm(), name="engine")
    with pytest.raises(EngineError, match="block table is full"):
        driver.run("ask", fail, 5.0)
    assert driver.run("ask again", lambda llm: 1, 5.0) == 1
    driver.close(end_processes=False)


def test_a_call_that_hangs_ends_at_its_bound_and_the_next_says_why(release: threading.Event) -> None:
    driver = LlmDriver(FakeLlm(), name="engine")
    with pytest.raises(EngineError, match="did not finish receive within"):
        driver.run("receive", lambda llm: release.wait(30), 0.3)
    with pytest.raises(EngineError, match="busy with receive"):
        driver.run("generate", lambda llm: 1, 0.3)
    release.set()
    assert driver.run("ask", lambda llm: 2, 5.0) == 2, "an answer that came late is not taken for another's"
    driver.close(end_processes=False)


def test_a_killed_process_ends_a_running_call(
    sleeper: subprocess.Popen[bytes], release: threading.Event
) -> None:
    driver = LlmDriver(FakeLlm(sleeper), name="engine")
    threading.Timer(0.3, os.kill, (sleeper.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=str(sleeper.pid)):
        driver.run("receive", lambda llm: release.wait(30), 30.0)
    assert time.monotonic() - started < 5.0
    with pytest.raises(EngineDeadError, match=str(sleeper.pid)):
        driver.require_alive()
    release.set()
    driver.close(end_processes=False)


def test_a_watched_worker_counts_like_the_engine_core(sleeper: subprocess.Popen[bytes]) -> None:
    driver = LlmDriver(FakeLlm(), name="engine")
    driver.watch(sleeper.pid, "worker 1")
    driver.require_alive()
    sleeper.kill()
    sleeper.wait(10)
    with pytest.raises(EngineDeadError, match="worker 1 has ended"):
        driver.run("ask", lambda llm: 1, 5.0)
    driver.close(end_processes=False)


def test_a_client_that_gave_up_counts_as_dead() -> None:
    llm = FakeLlm()
    driver = LlmDriver(llm, name="engine")
    llm.resources.engine_dead = True
    with pytest.raises(EngineDeadError, match="engine core failed"):
        driver.run("ask", lambda llm: 1, 5.0)
    driver.close(end_processes=False)


def test_closing_ends_processes_only_when_told(sleeper: subprocess.Popen[bytes]) -> None:
    LlmDriver(FakeLlm(sleeper), name="engine").close(end_processes=False)
    assert sleeper.poll() is None
    LlmDriver(FakeLlm(sleeper), name="engine").close(end_processes=True)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_zombie_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    watched = WatchedProcess(process.pid, "it")
    deadline = time.monotonic() + 20.0
    while not watched.ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first_ended((watched,)) is watched  # nobody has reaped it yet
    assert process.wait(10) == 0
    watched.close()


def test_a_pid_that_was_never_there_has_ended() -> None:
    assert WatchedProcess(2**22 - 3, "nobody").ended
