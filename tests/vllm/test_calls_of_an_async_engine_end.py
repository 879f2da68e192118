"""Bounds of calls over a stand-in for `AsyncLLM` on a real event loop; the live tests kill real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.errors import EngineDeadError, EngineError
from weightlane_vllm.async_driver import AsyncDriver
from weightlane_vllm.async_llm_calls import AsyncLlmCalls
from weightlane_vllm.loop_thread import LoopThread
from weightlane_vllm.opened_engine import WORKER_EXTENSION_CLASS, calls_on, is_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane_vllm.engine_calls import PauseMode


class FakeAsyncLlm:
    """What is looked at of an `AsyncLLM`: its client's resources, its output task, and some calls."""

    def __init__(self, *processes: subprocess.Popen[bytes], extension: str = WORKER_EXTENSION_CLASS) -> None:
        named = [SimpleNamespace(pid=process.pid, name="EngineCore_DP0") for process in processes]
        resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=named), engine_dead=False)
        self.engine_core = SimpleNamespace(resources=resources)
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
        self.model_config = SimpleNamespace(model="/model")
        self.output_handler: asyncio.Task[Any] | None = None
        self.paused: list[str] = []
        self.cancelled = threading.Event()

    def start(self) -> None:
        self.output_handler = asyncio.get_running_loop().create_task(asyncio.sleep(3600))

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [(method, *args)]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused.append(f"{mode} {clear_cache}")

    async def hang(self) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def engine(loop: LoopThread) -> FakeAsyncLlm:
    engine = FakeAsyncLlm()
    loop.call(engine.start, 5.0)
    return engine


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(10)


def test_a_call_runs_on_the_engine_s_own_loop(engine: FakeAsyncLlm) -> None:
    calls = calls_on(engine)
    assert isinstance(calls, AsyncLlmCalls)
    assert calls.collective_rpc("ask", "method", (b"x",), 5.0) == [("method", b"x")]
    assert calls.pause_modes == ("wait", "abort", "keep")
    calls.pause("keep", 5.0)
    assert engine.paused == ["keep False"], "the caches are emptied when the new weights are there"
    calls.detach()


class PreemptingFake(FakeAsyncLlm):
    """Its pause leaves requests that were preempted in its queue, as vLLM's does; steps end them."""

    def __init__(self, steps_to_go: int) -> None:
        super().__init__()
        self.steps_to_go = steps_to_go
        self.resumed = 0
        self.engine_core.outputs_queue = asyncio.Queue()
        waiting = SimpleNamespace(is_prefilling=True, lora_request=None)
        preempted = SimpleNamespace(is_prefilling=False, lora_request=None)
        self.output_processor = SimpleNamespace(request_states={"new": waiting, "preempted": preempted})

    async def resume_generation(self) -> None:
        self.resumed += 1
        if self.resumed == self.steps_to_go:
            del self.output_processor.request_states["preempted"]


def test_a_drain_waits_for_what_the_engine_has_preempted(loop: LoopThread) -> None:
    engine = PreemptingFake(steps_to_go=3)
    loop.call(engine.start, 5.0)
    calls = calls_on(engine)
    calls.pause("wait", 5.0)
    assert engine.paused == ["wait False"] * 4
    assert engine.resumed == 3
    assert set(engine.output_processor.request_states) == {"new"}, "what has no token yet may wait"
    calls.detach()


def test_a_drain_that_the_engine_s_preemptions_outlast_is_an_error(loop: LoopThread) -> None:
    engine = PreemptingFake(steps_to_go=10**9)
    loop.call(engine.start, 5.0)
    calls = calls_on(engine)
    with pytest.raises(EngineError, match=r"did not finish pause_generation \(wait\) within 0\.3 s"):
        calls.pause("wait", 0.3)
    calls.detach()


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_other_pauses_let_nothing_go_on(loop: LoopThread, mode: PauseMode) -> None:
    engine = PreemptingFake(steps_to_go=1)
    loop.call(engine.start, 5.0)
    calls = calls_on(engine)
    calls.pause(mode, 5.0)
    assert (engine.paused, engine.resumed) == ([f"{mode} False"], 0)
    calls.detach()


def test_an_engine_whose_pause_takes_no_mode_cannot_be_paused(engine: FakeAsyncLlm) -> None:
    class OlderAsyncLlm(FakeAsyncLlm):
        async def pause_generation(self) -> None:  # type: ignore[override]
            """As before 0.16."""

    older = OlderAsyncLlm()
    older.output_handler = engine.output_handler
    assert AsyncLlmCalls(older).pause_modes == ()


def test_an_async_engine_is_told_apart_by_its_calls() -> None:
    assert is_async(FakeAsyncLlm())
    assert not is_async(SimpleNamespace(collective_rpc=lambda: None))


def test_the_loop_s_own_thread_is_refused_at_once(loop: LoopThread, engine: FakeAsyncLlm) -> None:
    driver = AsyncDriver(engine, name="engine")
    with pytest.raises(EngineError, match="from the thread of its own event loop"):
        loop.call(lambda: driver.run("ask", lambda it: it.hang(), 60.0), 5.0)


def test_an_engine_without_a_loop_is_refused_with_what_to_do() -> None:
    with pytest.raises(EngineError, match="has no event loop yet"):
        AsyncDriver(FakeAsyncLlm(), name="engine")


def test_an_engine_without_our_extension_is_refused_with_the_argument_to_give() -> None:
    with pytest.raises(EngineError, match=r"AsyncEngineArgs\(\.\.\., worker_extension_cls='weightlane_vllm"):
        calls_on(FakeAsyncLlm(extension=""))


def test_an_engine_error_keeps_its_text(engine: FakeAsyncLlm) -> None:
    async def fail(_: Any) -> None:
        raise RuntimeError("block table is full")

    driver = AsyncDriver(engine, name="engine")
    with pytest.raises(EngineError, match="block table is full"):
        driver.run("ask", fail, 5.0)


def test_a_call_that_hangs_ends_at_its_bound_and_is_cancelled(engine: FakeAsyncLlm) -> None:
    driver = AsyncDriver(engine, name="engine")
    with pytest.raises(EngineError, match="did not finish receive within"):
        driver.run("receive", lambda it: it.hang(), 0.3)
    assert engine.cancelled.wait(5.0)


def test_a_loop_that_ended_is_told(loop: LoopThread, engine: FakeAsyncLlm) -> None:
    driver = AsyncDriver(engine, name="engine")
    loop.close()
    with pytest.raises(EngineError, match="no running event loop"):
        driver.run("ask", lambda it: it.hang(), 5.0)


def test_a_killed_process_ends_a_running_call(loop: LoopThread, sleeper: subprocess.Popen[bytes]) -> None:
    engine = FakeAsyncLlm(sleeper)
    loop.call(engine.start, 5.0)
    driver = AsyncDriver(engine, name="engine")
    threading.Timer(0.3, os.kill, (sleeper.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=str(sleeper.pid)):
        driver.run("receive", lambda it: it.hang(), 30.0)
    assert time.monotonic() - started < 5.0
    with pytest.raises(EngineDeadError, match=str(sleeper.pid)):
        driver.require_alive()
    driver.close(end_processes=False)
