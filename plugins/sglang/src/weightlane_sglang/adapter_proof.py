"""What a server bound of an adapter: read by our loader in its schedulers, or else as far as outputs tell."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from weightlane.adapters import AdapterBinding, BoundModule
from weightlane.base_digest import value_digest
from weightlane.errors import EngineError, ProtocolError, VerificationError
from weightlane.peft import lora_name
from weightlane.trace.table import Untraced
from weightlane_sglang.adapter_canary import require_other_outputs
from weightlane_sglang.contract import CONTINUE_ROUTE, PAUSE_REQUEST, PAUSE_ROUTE
from weightlane_sglang.loader_channel import ask, why_not_asked
from weightlane_sglang.loader_messages import AdapterHeld, AskedModule, ReadAdapter
from weightlane_sglang.requests import json_body

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.facts import EngineFacts
    from weightlane_sglang.channel import Channel

_MOST_NAMED = 8


def binding_of(
    channel: Channel, facts: EngineFacts, load: AdapterLoad, *, held: bool, seconds: float
) -> AdapterBinding:
    """What every rank holds in its live pool, or why nobody could look, and what is known instead.

    Args:
        channel: to the server, which has just loaded it.
        facts: of that server.
        load: what was sent.
        held: the lane holds generation back; else it is frozen for the moment of the look, so that a look
            does not wait for requests that run. They go on after it.
        seconds: bound on each request.

    Raises:
        VerificationError: a rank holds other values than were sent, or outputs with it are the base's.
        EngineError: the server was asked and failed.
    """
    reason = why_not_asked(facts)
    if not reason:
        with nullcontext() if held else _frozen(channel, facts, seconds):
            answer = ask(channel, facts, _question(load), timeout_seconds=seconds)
        if not isinstance(answer, Untraced):
            return _agreed([item for item in answer if isinstance(item, AdapterHeld)], load, channel.url)
        reason = answer.reason
    if held:
        reason = f"{reason}; nothing could generate, so that outputs were not compared either"
    else:
        reason = f"{reason}; {require_other_outputs(channel, load, seconds=seconds)}"
    return AdapterBinding(load.ref, (), unread=reason)


def _question(load: AdapterLoad) -> ReadAdapter:
    asked: list[AskedModule] = []
    for module in load.config.target_modules:
        a, b = load.tensors[lora_name(module, "A")], load.tensors[lora_name(module, "B")]
        asked.append(AskedModule(module, int(b.shape[0]), value_digest(a), value_digest(b)))
    return ReadAdapter(load.ref.name, tuple(asked))


def _agreed(ranks: Sequence[AdapterHeld], load: AdapterLoad, url: str) -> AdapterBinding:
    if not ranks:
        raise ProtocolError(f"The code inside SGLang at {url} answered something else than was asked.")
    problems = [f"TP rank {rank}: {word}" for rank, item in enumerate(ranks) for word in item.problems]
    problems += [
        f"TP rank {rank}: SGLang also keeps {name}" for rank, item in enumerate(ranks) for name in item.others
    ]
    if len({(item.rank, item.scaling) for item in ranks}) > 1:
        told = ", ".join(f"{item.rank} and {item.scaling:g}" for item in ranks)
        problems.append(f"ranks differ in the adapter's rank and scale: {told}")
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise VerificationError(
            f"SGLang at {url} holds adapter {load.ref.name} otherwise than it was sent: "
            f"{'; '.join(problems[:_MOST_NAMED])}{more}.",
            "It would answer with the base, or with part of the adapter.",
            "Report this with the plan and the server's log.",
        )
    everywhere = set(load.config.target_modules).intersection(*(item.bound for item in ranks))
    first = ranks[0]
    modules = [module for module in load.config.target_modules if module in everywhere]
    return AdapterBinding(
        load.ref, tuple(BoundModule(module, first.rank, first.scaling) for module in modules)
    )


@contextmanager
def _frozen(channel: Channel, facts: EngineFacts, seconds: float) -> Iterator[None]:
    """Requests stand still and lose nothing; the update that carries a question waits for none of them."""
    pause = json_body(facts, PAUSE_REQUEST, {"mode": "in_place"}).encode()
    try:
        _post(channel, PAUSE_ROUTE, pause, seconds)
        yield
    finally:
        try:
            _post(channel, CONTINUE_ROUTE, b"{}", seconds)
        except EngineError as error:
            raise error.adding(
                "Requests stand still there since it was paused for a look at its adapter, until it is sent "
                "that request or a sync succeeds."
            ) from error


def _post(channel: Channel, route: str, body: bytes, seconds: float) -> None:
    channel.send("POST", route, timeout_seconds=seconds, body=(body,), length=len(body))
