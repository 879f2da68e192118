"""The same requests as to a server, made on an `sgl.Engine` object of this process.

The engine stays its owner's. Like any two calls of an engine, one of its owner's from another thread while a
call of ours runs its event loop is refused by SGLang itself; in a program whose own event loop runs the
engine (`async_generate`), both may come at any time.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import EngineDeadError, EngineError
from weightlane.watched_process import WatchedProcess, first_ended
from weightlane_sglang.engine_loop import EngineLoop
from weightlane_sglang.engine_requests import STRUCTS, RequestClasses
from weightlane_sglang.engine_routes import EngineRoutes, as_json
from weightlane_sglang.http_channel import QUOTED_CHARACTERS, failed, quoted
from weightlane_sglang.payload import EncodedBucket, PayloadPlace, pickled

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from weightlane_sglang.engine_loop import OnLoop

_ENGINE_HAS = ("tokenizer_manager", "server_args", "loop", "generate", "shutdown")


class EngineChannel:
    """Requests to one `Engine`; see `channel.Channel`.

    Args:
        engine: alive, made in this process; of several nodes the first one's.

    Raises:
        EngineError: it is no such object.
    """

    host = "127.0.0.1"  # its schedulers are children of this process

    def __init__(self, engine: Any) -> None:
        require_engine(engine)
        version = str(import_module("sglang.version").__version__)
        self._engine = engine
        self._children = tuple(
            WatchedProcess(pid, f"its child process {pid}") for pid in _child_process_ids(engine)
        )
        first = f", whose first child is {self._children[0].pid}" if self._children else ""
        self.url = f"the Engine of process {os.getpid()}{first}"
        self._routes = EngineRoutes(engine, RequestClasses(import_module(STRUCTS), version), version)
        self._loop = EngineLoop(self._current_loop, name=f"SGLang at {self.url}", check=self._check)
        self._closed = False
        self._last_done = ""

    def described(self, *, timeout_seconds: float) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """(routes, fields) from the methods of the engine and its request classes; nothing is waited for."""
        del timeout_seconds
        return self._routes.described()

    def get(self, route: str, *, timeout_seconds: float) -> bytes:
        """What the engine tells; see `send`."""
        return self.send("GET", route, timeout_seconds=timeout_seconds)

    def send(
        self,
        method: str,
        route: str,
        *,
        timeout_seconds: float,
        body: Iterable[bytes] = (),
        length: int = 0,
    ) -> bytes:
        """Makes the request object that the JSON of `body` describes and hands it to the engine.

        Raises:
            EngineDeadError: a process of the engine has ended.
            EngineError: SGLang refused it, raised, or did not answer in time; or its class has other fields.
        """
        fields = msgspec.json.decode(b"".join(body), type=dict[str, object]) if length else {}
        return self._answer(f"{method} {route}", self._started(method, route, fields), timeout_seconds)

    def send_tensors(
        self,
        route: str,
        tensors: Sequence[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        place: PayloadPlace,
        body: str,
        timeout_seconds: float,
    ) -> bytes:
        """As `send`; tensors go as the bytes of one pickle, which every rank is given."""
        fields = msgspec.json.decode(body, type=dict[str, object])
        if place.copies:
            fields[place.field] = [pickled(tensors)] * place.copies
        else:  # before 0.5.17 an adapter is one text
            fields[place.field] = b"".join(EncodedBucket(tensors).pieces).decode("ascii")
        return self._answer(f"POST {route}", self._started("POST", route, fields), timeout_seconds)

    def start(self, route: str, body: bytes, *, timeout_seconds: float) -> OnLoop[bytes]:
        """Begins the request; it goes on whenever somebody runs the engine's loop."""
        del timeout_seconds  # nothing of ours waits for it but who asks whether it has ended
        return self._started("POST", route, msgspec.json.decode(body, type=dict[str, object]))

    def close(self) -> None:
        """Lets go of the engine, which goes on; calls that run in other threads end with an error."""
        if not self._closed:
            self._closed = True
            for child in self._children:
                child.close()

    def _started(self, method: str, route: str, fields: Mapping[str, object]) -> OnLoop[bytes]:
        request = f"{method} {route}"
        self._check()
        return self._loop.start(request, lambda: self._asked(request, route, fields))

    async def _asked(self, request: str, route: str, fields: Mapping[str, object]) -> bytes:
        try:
            answer = as_json(await self._routes.answer(route, fields))
        except EngineError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[:QUOTED_CHARACTERS]
            raise EngineError(
                f"SGLang at {self.url} raised during {request}: {told}", "The engine refused the request."
            ) from error
        if failed(answer):
            raise EngineError(
                f"SGLang at {self.url} said that {request} failed: {quoted(answer)}",
                "The engine gives success=false.",
            )
        self._last_done = request
        return answer

    def _answer(self, request: str, pending: OnLoop[bytes], seconds: float) -> bytes:
        if pending.wait(seconds):
            return pending.value()
        raise EngineError(
            f"SGLang at {self.url} did not answer {request} within {seconds:.0f} s.",
            "Its processes are alive, but busy with it or waiting for something.",
        )

    def _current_loop(self) -> asyncio.AbstractEventLoop:
        """The one on which SGLang reads answers; before its first request, the one that it would use."""
        loop: asyncio.AbstractEventLoop = (
            getattr(self._engine.tokenizer_manager, "event_loop", None) or self._engine.loop
        )
        return loop

    def _check(self) -> None:
        if self._closed:
            raise EngineError(f"The handle on SGLang at {self.url} is closed.", "Nothing more is sent by it.")
        ended = first_ended(self._children)
        if ended is not None:
            before = f"The last request it answered was {self._last_done}." if self._last_done else ""
            raise EngineDeadError(
                f"SGLang at {self.url} is gone: {ended.what} has ended.",
                before or "It has not answered any request of this handle.",
                "Its log tells why; nearly every exception in SGLang's scheduler ends the whole engine.",
            )


def require_engine(engine: Any) -> None:
    """Raises EngineError for what is no `sgl.Engine` that takes requests about weights."""
    missing = [name for name in _ENGINE_HAS if not hasattr(engine, name)]
    if missing:
        kind = type(engine)
        raise EngineError(
            f"rollout('sglang', engine=...) was given a {kind.__module__}.{kind.__qualname__}.",
            f"An Engine of SGLang is driven, and this has no {', '.join(missing)}.",
            "Pass such an object, or url=... of a server.",
        )
    manager = engine.tokenizer_manager
    if not hasattr(manager, "update_weights_from_tensor"):
        raise EngineError(
            f"The SGLang Engine has a {type(manager).__name__}, which takes no requests about weights.",
            "It was started with several tokenizer workers, or it is not the first node's.",
            "Make it with tokenizer_worker_num=1, and pass the first node's.",
        )


def _child_process_ids(engine: Any) -> tuple[int, ...]:
    """Schedulers and detokenizer; none before SGLang keeps a list of them, in 0.5.10 or so."""
    started = getattr(engine, "_scheduler_init_result", None)
    return tuple(getattr(started, "all_child_pids", None) or ())
