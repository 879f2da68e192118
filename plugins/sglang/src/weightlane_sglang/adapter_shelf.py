"""The adapters that one server holds for one lane: loaded under names, read back, unloaded.

SGLang holds adapters by name and puts none in the place of another: a name that is loaded must be unloaded
first. Its unload refuses new requests for the name at once and then waits for those that run, and every
other load waits for it; so it is started and not waited for until the next load.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineDeadError, EngineError, SyncError
from weightlane_sglang.adapter_contract import CONFIG_FIELD, MODELS_ROUTE, NAME_FIELD, UNLOAD_ROUTE
from weightlane_sglang.adapter_proof import binding_of
from weightlane_sglang.contract import FLUSH_ROUTE
from weightlane_sglang.http_channel import quoted
from weightlane_sglang.lifecycle import FLUSH_IDLE_SECONDS
from weightlane_sglang.payload import PayloadPlace
from weightlane_sglang.server_facts import decoded

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding, AdapterRef
    from weightlane.facts import EngineFacts
    from weightlane.program import AdapterMove
    from weightlane_sglang.channel import Channel, Pending

_MOST_LOADED = "max_loaded_loras"
_GRACE_SECONDS = 1.0  # where nothing runs with it an unload ends at once
_UNLOAD_SECONDS = 3600.0  # as long as the requests that run with it may take
log = logging.getLogger("weightlane_sglang")


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Loaded(msgspec.Struct):
    loaded_adapters: dict[str, object] | None = None


class ServerAdapters:
    """Called from one thread at a time.

    Args:
        channel: to the server.
        facts: asks for its facts.
        seconds: bound on each small request.
    """

    def __init__(self, channel: Channel, facts: Callable[[], EngineFacts], *, seconds: float) -> None:
        self._channel = channel
        self._facts = facts
        self._seconds = seconds
        self._own: dict[str, AdapterRef] = {}
        self._served: AdapterRef | None = None
        self._left: tuple[str, ...] = ()
        self._known: set[str] | None = None
        """Versions of the adapter that this lane met or sent; None before its first load."""
        self._going: dict[str, Pending] = {}

    def load(self, move: AdapterMove, load: AdapterLoad, *, held: bool) -> AdapterBinding:
        """One request with the whole adapter, then a look at what it bound; an error leaves nothing of it.

        Raises:
            SyncError: this lane serves that very name, requests still run with one that must go first, or
                somebody else loaded a version of the adapter since this lane began.
            EngineError: the server refuses, in its own words, or has no room for one more.
            VerificationError: it was bound otherwise than it was sent.
        """
        name = load.ref.name
        if name in self._own:
            raise SyncError(
                f"{name} is loaded into SGLang at {self._channel.url} and serves already.",
                "A name means one set of weights there, and none can be put in its place while it serves.",
                "Give every sync a version of its own.",
            )
        self._await_unloads(move.timeout_seconds)
        facts = self._facts()
        loaded = self._loaded_names()
        self._require_alone(load.config.name, loaded)
        if name in loaded:
            # Left by a trainer that is gone. What its requests had cached must not answer for the new one.
            self._unload(name, move.timeout_seconds)
            self._flush()
            loaded = [other for other in loaded if other != name]
        left = [other for other in loaded if other not in self._own and _is_of(load.config.name, other)]
        while left and not _has_room(facts, loaded):
            self._unload(left[0], move.timeout_seconds)
            loaded.remove(left.pop(0))
        self._require_room(facts, loaded)
        self._left = tuple(left)
        if self._known is not None:
            self._known.add(name)  # before: one that is not answered in time may be loaded later
        self._send(move, load)
        try:
            binding = binding_of(self._channel, facts, load, held=held, seconds=move.timeout_seconds)
        except BaseException as error:
            self._unload_after(name, error)
            raise
        self._own[name] = load.ref
        return binding

    def serve(self, ref: AdapterRef) -> None:
        """Requests may name it. What a trainer that is gone had left under the adapter's name is unloaded."""
        self._served = ref
        left, self._left = self._left, ()
        for name in left:
            try:
                self._start_unload(name)
            except EngineDeadError:
                raise
            except EngineError as error:  # the new one serves; the next load comes back to this one
                log.warning("a trainer that is gone left %s, which was not unloaded: %s", name, error)

    def remove(self, ref: AdapterRef) -> None:
        """New requests for it are refused from now on; it goes when those that run have ended."""
        if self._own.pop(ref.name, None) is None:
            return
        if self._served == ref:
            self._served = None
        self._start_unload(ref.name)

    def require_named(self, adapter: AdapterRef | None) -> str:
        """The name for a request, "" for none.

        Raises:
            EngineError: it names none although this lane serves one: the base would answer for it.
        """
        if adapter is None and self._served is not None:
            raise EngineError(
                f"A request to SGLang at {self._channel.url} names no adapter.",
                f"It serves {self._served.name}, and a request without a name is answered with the base.",
                "Name lane.adapter_ref().",
            )
        return adapter.name if adapter else ""

    # -- requests -------------------------------------------------------------------------------------------

    def _send(self, move: AdapterMove, load: AdapterLoad) -> None:
        fields = msgspec.json.decode(move.body, type=dict[str, msgspec.Raw])
        body = msgspec.json.encode(
            {**fields, NAME_FIELD: load.ref.name, CONFIG_FIELD: msgspec.Raw(load.wire.encode())}
        ).decode()
        place = PayloadPlace(move.payload_field, move.copies)
        answer = self._channel.send_tensors(
            move.route, load.tensors, place=place, body=body, timeout_seconds=move.timeout_seconds
        )
        told = decoded(answer, _Loaded, move.route).loaded_adapters
        if told is not None and load.ref.name not in told:
            raise EngineError(
                f"SGLang at {self._channel.url} says that it loaded {load.ref.name} and does not list it: "
                f"{quoted(answer)}",
                "It holds another set of adapters than the lane does.",
            )

    def _loaded_names(self) -> list[str]:
        answer = self._channel.get(MODELS_ROUTE, timeout_seconds=self._seconds)
        return [card.id for card in decoded(answer, _Models, MODELS_ROUTE).data if card.parent]

    def _require_alone(self, adapter: str, loaded: list[str]) -> None:
        """What is there at a lane's first load may be a dead trainer's, what comes later a living one's."""
        versions = {name for name in loaded if _is_of(adapter, name)}
        if self._known is None:
            if versions:
                log.warning(
                    "SGLang at %s holds %s, which this lane did not load and takes the place of: a trainer "
                    "that still uses that name for an adapter would lose it",
                    self._channel.url,
                    ", ".join(sorted(versions)),
                )
            self._known = versions
        foreign = sorted(versions - self._known)
        if foreign:
            raise SyncError(
                f"Somebody else loaded {', '.join(foreign)} into SGLang at {self._channel.url} since this "
                "lane began to sync to it.",
                f"Adapter {adapter} is this lane's there: each of two lanes would unload the other's, and "
                "requests that name it would be answered with either.",
                "Give each lane's adapter a name of its own, or unload it if nobody uses it.",
            )

    def _require_room(self, facts: EngineFacts, loaded: list[str]) -> None:
        if not _has_room(facts, loaded):
            most = facts.launch_arguments[_MOST_LOADED]
            raise EngineError(
                f"SGLang at {self._channel.url} was started for {most} adapters, holds {', '.join(loaded)}.",
                "It would unload the one that was used longest ago, whoever's it is.",
                "Unload what is not needed, or start it with a larger --max-loaded-loras.",
            )

    def _flush(self) -> None:
        route = f"{FLUSH_ROUTE}?timeout={FLUSH_IDLE_SECONDS}"
        self._channel.send("POST", route, timeout_seconds=FLUSH_IDLE_SECONDS + 30.0)

    # -- unloading ------------------------------------------------------------------------------------------

    def _start_unload(self, name: str) -> None:
        self._going[name] = self._channel.start(UNLOAD_ROUTE, _named(name), timeout_seconds=_UNLOAD_SECONDS)
        self._is_gone(name, _GRACE_SECONDS)

    def _await_unloads(self, seconds: float) -> None:
        for name in tuple(self._going):
            if not self._is_gone(name, seconds):
                raise SyncError(
                    f"Requests that name adapter {name} still run in SGLang at {self._channel.url}.",
                    f"It is unloaded when they have ended, and they had not within {seconds:.0f} s; nothing "
                    "else is loaded before.",
                    "Await them before the sync after the next.",
                )

    def _is_gone(self, name: str, seconds: float) -> bool:
        """Whether its unload ends within `seconds`; one that failed is told once."""
        try:
            gone = self._going[name].wait(seconds)
        except BaseException:
            del self._going[name]
            raise
        if gone:
            del self._going[name]
        return gone

    def _unload(self, name: str, seconds: float) -> None:
        body = _named(name)
        self._channel.send("POST", UNLOAD_ROUTE, timeout_seconds=seconds, body=(body,), length=len(body))

    def _unload_after(self, name: str, error: BaseException) -> None:
        """Takes out what failed; that this fails too is told with the first error."""
        try:
            self._unload(name, self._seconds)
        except EngineError as second:
            error.__context__ = second


def _named(name: str) -> bytes:
    return msgspec.json.encode({NAME_FIELD: name})


def _has_room(facts: EngineFacts, loaded: list[str]) -> bool:
    most = facts.launch_arguments.get(_MOST_LOADED, "")
    return not most.isdecimal() or len(loaded) < int(most)


def _is_of(adapter: str, name: str) -> bool:
    """Whether a loaded name is that of a version of this adapter."""
    return re.fullmatch(rf"{re.escape(adapter)}(@\d+)?", name) is not None
