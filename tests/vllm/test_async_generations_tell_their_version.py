"""Which version made an output of an `AsyncLLM`, over a stand-in on a real event loop."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.errors import EngineError
from weightlane_vllm.async_llm_calls import AsyncLlmCalls
from weightlane_vllm.engine_calls import Asked
from weightlane_vllm.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class FakeAsyncLlm:
    """Gives each request its outputs as the test lets it: `steps` holds back every step of all."""

    def __init__(self, clients: int = 1) -> None:
        self.engine_core = SimpleNamespace(resources=None)
        self.model_config = SimpleNamespace(model="/model")
        self.output_processor = SimpleNamespace(request_states={})
        self.output_handler: asyncio.Task[Any] | None = None
        self._client_count = clients
        self.paused: list[str] = []
        self.awake = 0
        self.cancelled = 0
        self.begun = 0

    def start(self) -> None:
        self.output_handler = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        self.steps = asyncio.Semaphore(0)

    async def generate(
        self, prompt: Any, parameters: Any, number: str, *, lora_request: Any
    ) -> AsyncIterator[Any]:
        if prompt == "bad":
            raise ValueError("bad prompt")
        for finished in (False, True):
            self.begun += 1
            try:
                await self.steps.acquire()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            yield SimpleNamespace(finished=finished, outputs=[SimpleNamespace(finish_reason="length")])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused.append(mode)

    async def resume_generation(self) -> None:
        self.paused.append("resume")

    async def sleep(self, level: int, mode: str) -> None:
        self.paused.append(f"sleep {mode}")

    async def wake_up(self, tags: list[str]) -> None:
        self.awake += 1


class Parameters:
    def clone(self) -> Parameters:
        return Parameters()


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


def beside(calls: AsyncLlmCalls, loop: LoopThread, *prompts: str) -> Any:
    """A generation that runs on, as a future."""
    executor = loop.loop.run_in_executor
    asked = Asked(prompts, Parameters())

    async def begin() -> Any:
        return executor(None, calls.generate, asked, 10.0)

    return loop.run(begin(), 5.0)


def step(engine: FakeAsyncLlm, loop: LoopThread, begun: int) -> None:
    """One output of a request, once that many were waited for."""

    deadline = time.monotonic() + 5.0
    while engine.begun < begun:
        assert time.monotonic() < deadline
        time.sleep(0.005)

    async def one() -> None:
        engine.steps.release()
        await asyncio.sleep(0.02)

    loop.run(one(), 5.0)


def result(future: Any, loop: LoopThread) -> Any:
    async def awaited() -> Any:
        return await future

    return loop.run(awaited(), 5.0)


def test_a_request_that_waited_through_a_sync_is_the_new_version_s(
    engine: FakeAsyncLlm, loop: LoopThread
) -> None:
    calls = AsyncLlmCalls(engine)
    calls.published(1, 5.0)
    future = beside(calls, loop, "prompt")
    calls.pause("wait", 5.0)
    calls.published(2, 5.0)
    calls.resume(5.0)
    step(engine, loop, 1)
    step(engine, loop, 2)
    (made,) = result(future, loop)
    assert made.version == 2


def test_one_that_ended_before_is_the_old_version_s(engine: FakeAsyncLlm, loop: LoopThread) -> None:
    calls = AsyncLlmCalls(engine)
    calls.published(1, 5.0)
    future = beside(calls, loop, "prompt")
    step(engine, loop, 1)
    step(engine, loop, 2)
    (made,) = result(future, loop)
    calls.published(2, 5.0)
    assert made.version == 1


def test_one_that_ran_before_and_after_is_no_version_s(engine: FakeAsyncLlm, loop: LoopThread) -> None:
    calls = AsyncLlmCalls(engine)
    future = beside(calls, loop, "prompt")
    step(engine, loop, 1)
    calls.pause("keep", 5.0)
    calls.resume(5.0)
    step(engine, loop, 2)
    with pytest.raises(EngineError, match="was made by more than one version"):
        result(future, loop)


def test_when_one_of_several_fails_the_others_are_given_up(engine: FakeAsyncLlm, loop: LoopThread) -> None:
    calls = AsyncLlmCalls(engine)
    with pytest.raises(EngineError, match="bad prompt"):
        calls.generate(Asked(("prompt", "bad"), Parameters()), 5.0)

    async def settled() -> None:
        await asyncio.sleep(0.05)

    loop.run(settled(), 5.0)
    assert engine.cancelled == 1


def test_a_pause_outlives_a_wake_up(engine: FakeAsyncLlm) -> None:
    """vLLM lets its scheduler go on once all memory is there."""
    calls = AsyncLlmCalls(engine)
    calls.sleep(1, 5.0)
    calls.wake_up(["weights"], 5.0)
    assert engine.paused == ["sleep keep"]
    calls.pause("wait", 5.0)
    calls.wake_up(["kv_cache"], 5.0)
    calls.resume(5.0)
    calls.wake_up(["kv_cache"], 5.0)
    assert engine.paused == ["sleep keep", "wait", "keep", "resume"]


def test_one_of_several_clients_of_an_engine_core_is_refused(loop: LoopThread) -> None:
    engine = FakeAsyncLlm(clients=2)
    loop.call(engine.start, 5.0)
    with pytest.raises(EngineError, match="one of 2 that share an engine core"):
        AsyncLlmCalls(engine)
