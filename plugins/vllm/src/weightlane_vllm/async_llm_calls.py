"""`EngineCalls` on an `AsyncLLM`, whose requests run on while a call is made."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from weightlane.errors import EngineError
from weightlane_vllm.async_driver import AsyncDriver
from weightlane_vllm.engine_calls import ADAPTERS_METHOD, Asked, Made, PauseMode
from weightlane_vllm.lora_request import lora_request
from weightlane_vllm.running_requests import Ran, RunningRequests, running_requests_of
from weightlane_vllm.served_adapters import chosen_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence

    from weightlane.adapters import AdapterRef

_T = TypeVar("_T")
_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
_OUTPUT_SECONDS = 0.01


class AsyncLlmCalls:
    """Made over a live `AsyncLLM`, from any thread but that of its event loop.

    Raises:
        EngineError: it has no event loop yet, or other processes send requests to the same engine core.
    """

    def __init__(self, engine: Any) -> None:
        _require_one_client(engine)
        self._engine = engine
        self._driver = AsyncDriver(engine, name=f"vLLM engine of {engine.model_config.model}")
        self._prefix = f"weightlane-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._requests = running_requests_of(engine)

    @property
    def config(self) -> Any:
        """The engine's `VllmConfig`."""
        return self._engine.vllm_config

    @property
    def pause_modes(self) -> tuple[PauseMode, ...]:
        """Those of `pause_generation`; none where it is absent or takes no mode (before 0.16)."""
        method = getattr(type(self._engine), "pause_generation", None)
        if method is None or "mode" not in inspect.signature(method).parameters:
            return ()
        return _MODES

    def watch(self, pid: int, what: str) -> None:
        """Also watches the process `pid` of the engine."""
        self._driver.watch(pid, what)

    def require_alive(self) -> None:
        """Raises EngineDeadError naming the process once one has ended, EngineError once the loop has."""
        self._driver.require_alive()

    def collective_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        """One call of a worker method on every worker. The engine core takes no step meanwhile."""

        async def call(engine: Any) -> list[Any]:
            replies: list[Any] = await engine.collective_rpc(method, args=arguments)
            return replies

        return self._driver.run(what, call, seconds)

    def publishing_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        """As any other: the engine pauses, or the adapter's turnover sees to the cache."""
        return self.collective_rpc(what, method, arguments, seconds)

    def require_idle(self, seconds: float) -> None:
        """Never refuses: its requests run on, and a pause or the turnover of adapters is planned for them."""

    def admit_adapters(self, names: Collection[str], seconds: float) -> None:
        """On the event loop."""
        self.with_requests("admit", lambda requests: requests.admit_only(names), seconds)

    def with_requests(self, what: str, function: Callable[[RunningRequests], _T], seconds: float) -> _T:
        """`function` of the requests that run, on the event loop."""

        async def call(_: Any) -> _T:
            return function(self._requests)

        return self._driver.run(what, call, seconds)

    def abort(self, choose: Callable[[RunningRequests], list[str]], seconds: float) -> int:
        """Aborts the requests that `choose` gives the numbers of; they end with what they have."""

        async def call(engine: Any) -> int:
            numbers = choose(self._requests)
            if numbers:
                await engine.abort(numbers, internal=True)
            return len(numbers)

        return self._driver.run("abort", call, seconds)

    def generate(self, asked: Asked, seconds: float) -> list[Made]:
        """All prompts at once; one that is given up is aborted."""

        async def run(engine: Any) -> list[Made]:
            resumes, adapter = self._requests.resumes, await self._asked_for(engine, asked)
            named = lora_request(adapter) if adapter else None
            ended = await _all_of(
                self._run_one(engine, prompt, asked.parameters, named) for prompt in asked.prompts
            )
            if any(ran.first != resumes for _, ran in ended):
                # It waited through a swap under a name that never changes, or was asked for in one.
                adapter = await self._asked_for(engine, asked)
            return [Made(output, adapter, ran.version) for output, ran in ended]

        return self._driver.run("generate", run, seconds)

    async def _asked_for(self, engine: Any, asked: Asked) -> AdapterRef | None:
        if asked.adapter is None:
            return None
        return chosen_adapter(await engine.collective_rpc(ADAPTERS_METHOD), asked.adapter)

    async def _run_one(self, engine: Any, prompt: Any, parameters: Any, named: Any) -> tuple[Any, Ran]:
        number = f"{self._prefix}-{next(self._numbers)}"
        last, first = None, -1
        # `clone`: vLLM writes into what it is given, and these run side by side.
        async for output in engine.generate(prompt, parameters.clone(), number, lora_request=named):
            first = self._requests.resumes if last is None else first
            last = output
        if last is None or not last.finished:
            raise EngineError(f"vLLM ended request {number} without a finished output.")
        ran = Ran(first, self._requests.resumes, self._requests.published)
        if not ran.in_one_go and last.outputs[0].finish_reason != "abort":
            raise EngineError(
                f"Request {number} was made by more than one version.",
                "It ran while weights were written, and went on with the new ones (requests='keep').",
                "Ask again, or connect with requests='drain'.",
            )
        return last, ran

    def set_weight_version(self, version: str, seconds: float) -> None:
        """Labels what the engine samples from now on."""
        self._driver.run("set_weight_version", lambda engine: engine.update_weight_version(version), seconds)

    def published(self, version: int, seconds: float) -> None:
        """Notes what is published, on the event loop: outputs that came before tell what was before."""
        self.with_requests("published", lambda requests: setattr(requests, "published", version), seconds)

    def reset_prefix_cache(self, seconds: float) -> bool:
        """Empties the prefix cache; False where it did not: running requests use blocks."""
        return bool(
            self._driver.run("reset_prefix_cache", lambda engine: engine.reset_prefix_cache(), seconds)
        )

    def reset_prefix_cache_of_running(self, seconds: float) -> bool:
        """The same, running requests taken off first: they compute their keys and values anew, and go on."""
        return bool(
            self._driver.run(
                "reset_prefix_cache",
                lambda engine: engine.reset_prefix_cache(reset_running_requests=True),
                seconds,
            )
        )

    def reset_encoder_cache(self, seconds: float) -> None:
        """Forgets what vision and audio encoders made of inputs."""
        self._driver.run("reset_encoder_cache", lambda engine: engine.reset_encoder_cache(), seconds)

    def pause(self, mode: PauseMode, seconds: float) -> None:
        """vLLM's own pause: the call ends once no request runs (`wait`, `abort`) or none is stepped (`keep`).

        The caches are left: they are emptied once the new weights are there, and not before.

        With `wait`, vLLM itself waits for the requests that run and not for those that it has preempted: they
        queue again with the tokens that they have, and would go on with the new weights (0.27.1 and 0.32.0,
        `Scheduler.get_num_unfinished_requests`). So it is let go on until none of them is left; whatever it
        takes up meanwhile is waited for as well.
        """

        async def call(engine: Any) -> None:
            self._requests.paused = True
            await engine.pause_generation(mode=mode, clear_cache=False)
            while mode == "wait" and await self._any_half_done(engine):
                await engine.resume_generation()  # its next step takes up those that it preempted first
                await asyncio.sleep(_OUTPUT_SECONDS)
                await engine.pause_generation(mode=mode, clear_cache=False)

        self._driver.run(f"pause_generation ({mode})", call, seconds)

    async def _any_half_done(self, engine: Any) -> bool:
        """Whether a request has tokens and has not ended, once all outputs before the pause are noted."""
        outputs = getattr(engine.engine_core, "outputs_queue", None)
        idle = False
        while not idle:
            idle = outputs is None or outputs.empty()
            await asyncio.sleep(_OUTPUT_SECONDS)  # after it too: what was taken off last is noted in parts
        return bool(self._requests.half_done())

    def resume(self, seconds: float) -> None:
        """Lets generation go on."""

        async def call(engine: Any) -> None:
            self._requests.resumes += 1  # before a request that waited has its first output
            await engine.resume_generation()
            self._requests.paused = False

        self._driver.run("resume_generation", call, seconds)

    def sleep(self, level: int, seconds: float) -> None:
        """vLLM's sleep, which pauses its scheduler; requests that wait or run go on when it is awake."""
        self._driver.run("sleep", lambda engine: engine.sleep(level, mode="keep"), seconds)

    def release_kv_cache_memory(self, seconds: float) -> None:
        """Lets the cache go alone; no request may run."""
        self._driver.run("release_kv_cache_memory", lambda engine: engine.release_kv_cache_memory(), seconds)

    def wake_up(self, tags: Sequence[str], seconds: float) -> None:
        """Takes back memory by tag.

        Once all of it is there vLLM lets generation go on: a pause of ours is renewed in the same breath. A
        step may come between; `keep` then freezes what it began.
        """

        async def call(engine: Any) -> None:
            await engine.wake_up(list(tags))
            if self._requests.paused:
                await engine.pause_generation(mode="keep", clear_cache=False)

        self._driver.run("wake_up", call, seconds)

    def shutdown(self, seconds: float) -> None:
        """Ends the engine; processes of it that do not end by themselves are killed."""

        async def end(engine: Any) -> None:
            engine.shutdown()

        try:
            self._driver.run("shutdown", end, seconds)
        except EngineError:
            pass  # dead, or busy: what is left of it is ended below
        finally:
            self._driver.close(end_processes=True)

    def detach(self) -> None:
        """Lets go of an engine that somebody else owns."""
        self._driver.close(end_processes=False)


def _require_one_client(engine: Any) -> None:
    clients = int(vars(engine).get("_client_count", 1))
    if clients > 1:
        raise EngineError(
            f"The AsyncLLM is one of {clients} that share an engine core.",
            "Requests of the others cannot be seen here, and must not meet an adapter that is removed.",
            "Start it with one API server process.",
        )


async def _all_of(made: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """What all give; when one fails the others are given up."""
    tasks = [asyncio.ensure_future(one) for one in made]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
