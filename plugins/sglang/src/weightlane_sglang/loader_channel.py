"""The controller's side of our code inside a server: asks by an update request, reads answers from files."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.errors import EngineDeadError, EngineError
from weightlane.failures import Failure, error_of
from weightlane.messages import decode, encode
from weightlane.trace.table import Untraced
from weightlane_sglang.contract import (
    PAYLOAD_FIELD,
    SELECTOR_FIELD,
    TARGET_MODEL,
    UPDATE_REQUEST,
    UPDATE_ROUTE,
)
from weightlane_sglang.empty_session import TimeLeft, send_in_session
from weightlane_sglang.loader_messages import MOST_REQUEST_BYTES, LoaderReply
from weightlane_sglang.loader_name import LOADER, LOADER_ARGUMENT, LOADER_OPTION
from weightlane_sglang.payload import PayloadPlace
from weightlane_sglang.requests import json_body, require_fields
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE, exchange, run_folder
from weightlane_sglang.session import wants_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import msgspec

    from weightlane.facts import EngineFacts
    from weightlane_sglang.channel import Channel

_GRACE_SECONDS = 2.0  # the answers are written before the request returns; file systems may lag
_AMD_DEVICE = Path("/dev/kfd")


def why_not_asked(facts: EngineFacts) -> str:
    """Why a server is not asked at all, as the reason of a plan; "" where it can be."""
    loaders = facts.launch_arguments.get(LOADER_ARGUMENT, "").split()
    if LOADER not in loaders:
        return f"the server was started without {LOADER_OPTION} {LOADER}"
    if facts.parallel.pipeline > 1 or facts.parallel.data > 1:
        return "the server runs pipeline- or data-parallel ranks, whose answers could not be told apart"
    if wants_session(facts):
        return _why_no_empty_session(facts)
    return ""


def _why_no_empty_session(facts: EngineFacts) -> str:
    """A session packs weights again at its end, also where it brought none: only undone where SGLang can."""
    packed = ""
    if facts.quantization:
        packed = f"the server quantizes its weights ({facts.quantization})"
    elif facts.launch_arguments.get("attention_backend") == "intel_amx":
        packed = "the server packs its weights for AMX"
    elif facts.launch_arguments.get("moe_runner_backend", "").startswith("flashinfer_trtllm"):
        packed = "the server holds its experts in a layout of their own"
    elif _AMD_DEVICE.exists():
        packed = "the server may shuffle its experts for an AMD GPU"
    if not packed:
        return ""
    return f"SGLang {facts.version} takes requests in a session that touches packed weights, and {packed}"


def ask(
    channel: Channel, facts: EngineFacts, request: msgspec.Struct, *, timeout_seconds: float
) -> tuple[LoaderReply, ...] | Untraced:
    """One reply per tensor-parallel rank, in rank order, or why none came.

    The request is an update of weights that carries none: it waits for requests in flight as each update
    does, aborts and flushes nothing, and leaves the version as it is.

    Raises:
        PlanError: the server does not list a field that the request needs.
        EngineError: the server refused the request or did not answer it, or a rank answered with an error.
    """
    reason = why_not_asked(facts)
    if reason:
        return Untraced(reason)
    message = encode(request)
    if len(message) > MOST_REQUEST_BYTES:
        raise EngineError(
            f"A request of {len(message)} bytes is too large for the code inside SGLang at {channel.url}."
        )
    found = carry(channel, facts, message, loader=LOADER, timeout_seconds=timeout_seconds)
    return _replies([item for item in found if item is not None], len(found), channel.url)


def carry(
    channel: Channel, facts: EngineFacts, message: bytes, *, loader: str, timeout_seconds: float
) -> tuple[bytes | None, ...]:
    """Hands a message to the function `loader` in every tensor-parallel rank; gives what each wrote.

    Args:
        channel: to a server whose arguments list `loader`: it dies of one that they do not.
        facts: of that server.
        message: not empty.
        loader: dotted name, also the `load_format` of the request.
        timeout_seconds: bound on all of it, to which a server that hangs adds the moment of looking for it.

    Raises:
        PlanError, EngineError: as `ask`, but for what a rank answered.
    """
    import torch

    left = TimeLeft(channel, timeout_seconds)
    with exchange() as answers:
        tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        ranks = facts.parallel.tensor
        place, body = PayloadPlace(PAYLOAD_FIELD, ranks), _body(facts, loader)

        def send(seconds: float) -> None:
            named = [(answers.token, tensor)]
            with _importable(channel):
                channel.send_tensors(UPDATE_ROUTE, named, place=place, body=body, timeout_seconds=seconds)

        if wants_session(facts):
            send_in_session(channel, send, left)
        else:
            send(left.seconds())
        return answers.answers(ranks, within_seconds=left.at_most(_GRACE_SECONDS))


def _replies(found: Sequence[bytes], ranks: int, url: str) -> tuple[LoaderReply, ...] | Untraced:
    if not found:
        return Untraced(
            f"the server took the request and wrote no answer into {run_folder()} of this host: it runs on "
            f"another host, as another user or with another {RUN_FOLDER_VARIABLE}, or its log tells"
        )
    if len(found) < ranks:
        raise EngineError(
            f"{len(found)} of {ranks} ranks of SGLang at {url} answered.",
            "The server's log tells what kept the others.",
        )
    sender = f"the code inside SGLang at {url}"
    replies: list[LoaderReply] = [decode(answer, LoaderReply, sender=sender) for answer in found]
    for reply in replies:
        if isinstance(reply, Failure):
            raise error_of(reply)
    return tuple(replies)


def _body(facts: EngineFacts, loader: str) -> str:
    require_fields(facts, UPDATE_REQUEST, (PAYLOAD_FIELD,))
    values: dict[str, object] = {"load_format": loader, "flush_cache": False, "abort_all_requests": False}
    # A drafter has a model of its own, and is not asked; the field's name tells the era.
    listed = facts.request_fields.get(UPDATE_REQUEST, ())
    if SELECTOR_FIELD in listed:
        values[SELECTOR_FIELD] = TARGET_MODEL
    elif "disable_draft_model" in listed:
        values["disable_draft_model"] = True
    if "torch_empty_cache" in listed:
        values["torch_empty_cache"] = False
    return json_body(facts, UPDATE_REQUEST, values)


@contextmanager
def _importable(channel: Channel) -> Iterator[None]:
    """What a listed loader that the server cannot import does to it, said where it is seen."""
    try:
        yield
    except EngineDeadError as error:
        raise error.adding(
            f"SGLang dies where it cannot import {LOADER}, which its arguments list: the environment of the "
            f"server at {channel.url} must hold weightlane-sglang."
        ) from error
