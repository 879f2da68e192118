"""The front beside an OpenAI server: the same engine serves HTTP requests and lanes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import WeightlaneError
from weightlane_vllm.engine_calls import ADAPTERS_METHOD
from weightlane_vllm.front_engine import LlmFrontEngine
from weightlane_vllm.served_adapters import agreed

if TYPE_CHECKING:
    from weightlane_vllm.served_names import ServedNames

_log = logging.getLogger(__name__)

_START_SECONDS = 300.0  # from the moment at which the engine has a loop; it is not whole yet then
_ASK_SECONDS = 60.0
_SYNC_STARTS = frozenset({"receive", "begin-inline", "receive-disk"})
_ENDS = frozenset({"publish", "cancel", "detach"})


class _Kind(msgspec.Struct, frozen=True):
    type: str
    generation: str = "held"


class ServerFrontEngine(LlmFrontEngine):
    """A `FrontEngine` over the `AsyncLLM` of an OpenAI server, which also keeps the names of adapters there.

    Args:
        engine: the `AsyncLLM`.
        backend: the name under which its workers find this plugin.
        start_seconds: bound on the first question to the workers.
        names: where HTTP requests look up adapters.
    """

    def __init__(self, engine: Any, *, backend: str, start_seconds: float, names: ServedNames) -> None:
        super().__init__(engine, backend=backend, start_seconds=start_seconds)
        self._names = names

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        """As any front does; adapters cannot be named while a sync that holds generation back writes."""
        kind = msgspec.msgpack.decode(message, type=_Kind)
        lora = kind.type != "describe" and self.facts().launch_arguments.get("enable_lora") == "true"
        if lora and kind.type in _SYNC_STARTS and kind.generation == "held":
            self._names.withdraw()
        replies = super().call_workers(message, timeout_seconds)
        if lora and kind.type in _ENDS:
            self._show_served()
        return replies

    def shutdown(self) -> None:
        """Ends the whole server, in its own orderly way."""
        self.detach()
        _end_server()

    def _show_served(self) -> None:
        answers = self._calls.collective_rpc("a question for adapters", ADAPTERS_METHOD, (b"",), _ASK_SECONDS)
        self._names.show(agreed(answers).adapters)


def open_front(engine: Any, address: str, names: ServedNames) -> None:
    """Serves `engine` on `address` from a thread of its own, for as long as this process lives.

    The server ends where that fails: whoever asked for a front would else take it for one without.
    """
    threading.Thread(
        target=_serve, args=(engine, address, names), name="weightlane-front", daemon=True
    ).start()


def _serve(engine: Any, address: str, names: ServedNames) -> None:
    from weightlane.front.server import serve_front
    from weightlane_vllm.eras import reference_here

    try:
        front = ServerFrontEngine(engine, backend=reference_here(), start_seconds=_START_SECONDS, names=names)
        _log.info("weightlane: lanes reach this engine at %s", address)
        serve_front(front, address)
    except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this thread
        told = str(error) if isinstance(error, WeightlaneError) else f"{type(error).__name__}: {error}"
        sys.stderr.write(
            f"weightlane: the front {address} could not be served, so the server ends.\n{told}\n"
        )
        sys.stderr.flush()
        _end_server()


_ending = threading.Event()


def _end_server() -> None:
    if not _ending.is_set():
        _ending.set()
        os.kill(os.getpid(), signal.SIGTERM)
