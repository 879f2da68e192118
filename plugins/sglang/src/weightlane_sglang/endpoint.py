"""The handle on one SGLang: a server, or an `Engine` of this process, which takes the same requests.

The wire towards a server is its own: weights go as pickles inside JSON, because SGLang takes nothing else.
They go to the one address that the user named, loopback or not; what comes back is JSON only. Anyone who may
send SGLang such a request may run code in it, so its port belongs on a trusted network.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from weightlane.adapter_requests import AdapterEndpoint
from weightlane.endpoint import EngineEndpoint, ReadingBackEndpoint, TracingEndpoint
from weightlane.errors import EngineError, NotServableError
from weightlane.receiver import WorkerDescription
from weightlane.residency import WorkerResidency
from weightlane.trace.table import Untraced
from weightlane_sglang.adapter_shelf import ServerAdapters
from weightlane_sglang.announced_updates import AnnouncedUpdates
from weightlane_sglang.channel import open_channel
from weightlane_sglang.contract import CONTINUE_ROUTE, END_UPDATE_ROUTE, GENERATE_ROUTE
from weightlane_sglang.expected import expected_tensors
from weightlane_sglang.generation import generate_body, read_generations
from weightlane_sglang.loader_channel import ask
from weightlane_sglang.loader_messages import (
    ElementsHashed,
    HashElements,
    Released,
    TellReleased,
    Traced,
    TraceLoad,
)
from weightlane_sglang.payload import PayloadPlace
from weightlane_sglang.server_facts import (
    read_facts,
    read_incarnation,
    read_model_info,
    read_only_incarnation,
    version_number,
)
from weightlane_sglang.server_memory import MEMORY_ROUTES, ServerMemory
from weightlane_sglang.session import UpdateSession, is_for_session, wants_session
from weightlane_sglang.untimed_flush import is_untimed_flush, until_idle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import AdapterBinding, AdapterRef
    from weightlane.contexts import EndpointContext, RolloutTarget
    from weightlane.facts import EngineFacts
    from weightlane.messages import Generation, WireTensor
    from weightlane.program import AdapterMove, EngineCall, RequestMove
    from weightlane.trace.table import LiveHashes, PlacementTable


class SglangEndpoint(EngineEndpoint, TracingEndpoint, ReadingBackEndpoint, AdapterEndpoint):
    """Requests to one server, or to one `Engine`.

    Args:
        target: the server's URL or the `Engine` object and, where this process cannot read the server's model
            folder, its own.
        timeout_seconds: bound on each small request, and on a generation.
    """

    def __init__(self, target: RolloutTarget, *, timeout_seconds: float) -> None:
        self._model = target.model
        self._timeout = timeout_seconds
        self._channel = open_channel(target)
        self._session = UpdateSession(self._channel)
        self._announced = AnnouncedUpdates(self._channel)
        self._memory = ServerMemory(self._channel.url, self._incarnation, self._told_released)
        self._adapters = ServerAdapters(self._channel, self.facts, seconds=timeout_seconds)

    @property
    @override
    def address(self) -> str:
        return self._channel.url

    @override
    def facts(self) -> EngineFacts:
        return read_facts(self._channel, timeout_seconds=self._timeout)

    @override
    def describe_workers(self, backend: str) -> tuple[WorkerDescription, ...]:
        """One description on behalf of the whole server; `expected` comes from its checkpoint's config."""
        facts = self.facts()
        info = read_model_info(self._channel, timeout_seconds=self._timeout)
        dtype = facts.launch_arguments.get("dtype", "")
        return (
            WorkerDescription(
                worker=0,
                workers=1,
                host=self._channel.host,
                process_id=0,
                incarnation=read_only_incarnation(self._channel, timeout_seconds=self._timeout),
                device=facts.device,
                held_version=version_number(info.weight_version),
                expected=expected_tensors(self._model, info, dtype=dtype),
                facts=facts,
            ),
        )

    @override
    def residency(self, backend: str, lane: str, timeout_seconds: float) -> tuple[WorkerResidency, ...]:
        """Incarnation and weight version of the server as a whole; two small requests."""
        del backend, lane
        info = read_model_info(self._channel, timeout_seconds=timeout_seconds)
        return (
            WorkerResidency(
                worker=0,
                incarnation=read_incarnation(self._channel, timeout_seconds=timeout_seconds),
                held_version=version_number(info.weight_version),
            ),
        )

    @override
    def trace_workers(
        self, tensors: Sequence[WireTensor], timeout_seconds: float
    ) -> tuple[PlacementTable, ...] | Untraced:
        """Asks our loader inside the server, where it was started with one (see `loader_channel`).

        Raises:
            NotServableError: somebody has the server sleep; weights written into released memory end it.
            EngineError: the server was asked and failed.
        """
        request = TraceLoad(tuple(tensors))
        replies = ask(self._channel, self.facts(), request, timeout_seconds=timeout_seconds)
        if isinstance(replies, Untraced):
            return replies
        traced = [reply for reply in replies if isinstance(reply, Traced)]
        released = sorted({tag for reply in traced for tag in reply.released})
        if released:
            raise NotServableError(
                f"SGLang at {self.address} sleeps: it has released {', '.join(released)}.",
                "A lane takes back what it released alone, and nothing is written into memory that is gone.",
                "Resume it by /resume_memory_occupation with these tags, then connect.",
            )
        return tuple(reply.table for reply in traced)

    @override
    def read_back(self, tables: Sequence[PlacementTable], timeout_seconds: float) -> tuple[LiveHashes, ...]:
        """Asks our loader inside the server, which still holds the tables that it gave."""
        request = HashElements(tuple(table.digest() for table in tables))
        replies = ask(self._channel, self.facts(), request, timeout_seconds=timeout_seconds)
        if isinstance(replies, Untraced):
            raise EngineError(
                f"SGLang at {self.address} gave its tables when the plan was made, and now tells nothing of "
                f"what it holds: {replies.reason}.",
                "Without it nobody knows whether the weights are where they were sent.",
                'Mend that, or connect with read_back="never".',
            )
        return tuple(reply.hashes for reply in replies if isinstance(reply, ElementsHashed))

    @override
    def call_workers(self, message: bytes, timeout_seconds: float) -> Sequence[bytes]:
        raise EngineError(
            f"SGLang at {self.address} has no worker agent.",
            "Nothing of ours runs inside a server that somebody else started.",
            "Use the server's own requests (capability native-requests).",
        )

    @override
    def call(self, call: EngineCall, *, version: int | None = None) -> str:
        """Posts one request. A version goes as text, which is what SGLang keeps."""
        body = call.body
        if call.version_field:
            if version is None:
                raise EngineError(f"{call.route} publishes a version, and none was given.")
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            body = msgspec.json.encode({**fields, call.version_field: str(version)}).decode()
        data = body.encode()
        if call.route == END_UPDATE_ROUTE:
            self._session.ended()

        def send(seconds: float) -> bytes:
            return self._channel.send(
                "POST", call.route, timeout_seconds=seconds, body=(data,), length=len(data)
            )

        with self._memory.checked(call) if call.route in MEMORY_ROUTES else nullcontext():
            seconds = call.timeout_seconds
            answer = until_idle(send, seconds) if is_untimed_flush(call) else send(seconds)
        if call.route == CONTINUE_ROUTE:
            self._memory.goes_on()
        return answer.decode("utf-8", "replace")

    @override
    def send_bucket(
        self, move: RequestMove, tensors: Sequence[tuple[str, Tensor]], *, last: bool, version: int
    ) -> None:
        """Sends one bucket, in the dtypes given, by value or to a group; ends once the server has loaded it.

        An empty bucket is not sent: nothing in it marks the end. `version` has a call of its own. In the
        era of sessions, one is opened before the first bucket.
        """
        if not tensors:
            return
        if move.group is not None:
            body = move.last_body if last else move.body
            with self._session.held() if is_for_session(move) else nullcontext():
                self._announced.send(move, move.group, body, tensors)
            return
        with self._session.held() if is_for_session(move) else nullcontext():
            self._channel.send_tensors(
                move.route,
                tensors,
                place=PayloadPlace(move.payload_field, move.copies),
                body=move.last_body if last else move.body,
                timeout_seconds=move.timeout_seconds,
            )

    @override
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        adapter: AdapterRef | None = None,
    ) -> tuple[Generation, ...]:
        """Continuations of exactly `max_tokens` tokens, the end token ignored; greedy at temperature 0.

        Temperatures other than 0 and 1 are refused, since SGLang's log-probs would be of scaled logits.

        Raises:
            NotServableError: this handle has released memory of the server.
        """
        name = self._adapters.require_named(adapter)
        if not prompts:
            return ()
        self._memory.require_awake()
        body = generate_body(prompts, max_tokens=max_tokens, temperature=temperature, seed=seed, adapter=name)
        answer = self._channel.send(
            "POST", GENERATE_ROUTE, timeout_seconds=self._timeout, body=(body,), length=len(body)
        )
        made = read_generations(answer, prompts=len(prompts), max_tokens=max_tokens)
        if adapter is None:
            return made
        # SGLang has one label for all of its weights; the name tells which adapter it was.
        return tuple(msgspec.structs.replace(item, weight_version=adapter.version) for item in made)

    @override
    def load_adapter(self, move: AdapterMove, load: AdapterLoad, *, held: bool) -> AdapterBinding:
        return self._adapters.load(move, load, held=held)

    @override
    def serve_adapter(self, ref: AdapterRef) -> None:
        self._adapters.serve(ref)

    @override
    def remove_adapter(self, ref: AdapterRef) -> None:
        self._adapters.remove(ref)

    @override
    def close(self) -> None:
        self._announced.leave()
        self._channel.close()

    def _incarnation(self) -> str:
        return read_incarnation(self._channel, timeout_seconds=self._timeout)

    def _told_released(self) -> frozenset[str] | None:
        """Not in a session: its end goes through all weights, which may be among what is released."""
        facts = self.facts()
        if wants_session(facts):
            return None
        replies = ask(self._channel, facts, TellReleased(), timeout_seconds=self._timeout)
        if isinstance(replies, Untraced):
            return None
        told = [reply.tags for reply in replies if isinstance(reply, Released)]
        if not told or any(tags is None for tags in told):
            return None
        return frozenset(tag for tags in told for tag in tags or ())


def open_endpoint(context: EndpointContext) -> EngineEndpoint:
    """A handle on the server that the user named; reaches it once, so that a wrong address fails here."""
    endpoint = SglangEndpoint(context.target, timeout_seconds=context.timeout_seconds)
    try:
        endpoint.facts()
    except BaseException:
        endpoint.close()
        raise
    return endpoint
