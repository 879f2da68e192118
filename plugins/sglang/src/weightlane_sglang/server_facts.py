"""Facts of a live server, from its own description."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from weightlane.errors import EngineError
from weightlane.facts import EngineFacts, ParallelSizes
from weightlane_sglang.contract import (
    ENCODES,
    ENGINE,
    LAUNCH_ARGUMENTS_READ,
    MODEL_INFO_ROUTE,
    MODEL_INFO_ROUTES,
    SERVER_INFO_ROUTE,
    SERVER_INFO_ROUTES,
)
from weightlane_sglang.http_channel import quoted
from weightlane_sglang.unread_replies import one_of, read_server_info

if TYPE_CHECKING:
    from weightlane_sglang.channel import Channel

STARTUP_TIMES = "server_info.startup_time"
"""Whether the server tells how long its start took, as an attribute of facts: see `read_incarnation`."""


_ASKED_AT_CONNECT = 5
"""A balancer that takes turns is found by two, one that draws lots among two servers is missed once in 16."""


class ServerInfo(msgspec.Struct):
    """What `/server_info` tells that we use; `startup_time` are durations in seconds, of full precision."""

    version: str
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    device: str | None = None
    quantization: str | None = None
    random_seed: int | None = None
    startup_time: Any = None


class ModelInfo(msgspec.Struct):
    """What `/model_info` tells that we use. `weight_version` is text of the operator's choosing."""

    model_path: str
    weight_version: str | None = None
    architectures: list[str] | None = None
    has_image_understanding: bool | None = None
    has_audio_understanding: bool | None = None


def read_facts(channel: Channel, *, timeout_seconds: float) -> EngineFacts:
    """Facts of the server behind `channel`; three small requests, each within `timeout_seconds`."""
    routes, fields = channel.described(timeout_seconds=timeout_seconds)
    for known in (MODEL_INFO_ROUTES, SERVER_INFO_ROUTES):
        if not set(known) & set(routes):
            raise EngineError(
                f"The server at {channel.url} has no route {known[0]}.",
                "It is no SGLang server.",
                f"Routes found: {', '.join(routes[:40]) or 'none'}.",
            )
    answer = read_server_info(channel, timeout_seconds=timeout_seconds)
    info = decoded(answer, ServerInfo, SERVER_INFO_ROUTE)
    model = read_model_info(channel, timeout_seconds=timeout_seconds)
    arguments = _decode_arguments(answer)
    encodes = model.has_image_understanding or model.has_audio_understanding
    if model.architectures:
        arguments["architecture"] = ",".join(model.architectures)
    return EngineFacts(
        engine=ENGINE,
        version=info.version,
        source="server",
        attributes={STARTUP_TIMES: bool(info.startup_time), ENCODES: bool(encodes)},
        request_fields=fields,
        routes=routes,
        launch_arguments=arguments,
        parallel=ParallelSizes(tensor=info.tp_size, pipeline=info.pp_size, data=info.dp_size),
        model_path=model.model_path,
        device=info.device or "",
        quantization=info.quantization or "",
    )


def read_model_info(channel: Channel, *, timeout_seconds: float) -> ModelInfo:
    """The model that the server answers with now, and its weight version."""
    answer = one_of(channel, MODEL_INFO_ROUTES, timeout_seconds)
    return decoded(answer, ModelInfo, MODEL_INFO_ROUTE)


def read_incarnation(channel: Channel, *, timeout_seconds: float) -> str:
    """Sixteen hex digits that change when the server is started anew.

    SGLang tells neither process id nor start time; its measured start-up durations and its random seed are
    fixed at start and differ from start to start. Before 0.5.17 there is the seed alone, which is drawn at
    each start unless its user gives one.
    """
    answer = read_server_info(channel, timeout_seconds=timeout_seconds)
    info = decoded(answer, ServerInfo, SERVER_INFO_ROUTE)
    if not info.startup_time and info.random_seed is None:
        raise EngineError(
            f"{SERVER_INFO_ROUTE} of {channel.url} has neither startup_time nor random_seed.",
            "Without them a restarted server could not be told from the one that was planned for.",
            "SGLang 0.5.0 to 0.5.23, which this plugin knows, all report one of them.",
        )
    identity = msgspec.json.encode((info.version, info.random_seed, info.startup_time), order="sorted")
    return hashlib.sha256(identity).hexdigest()[:16]


def read_only_incarnation(channel: Channel, *, timeout_seconds: float) -> str:
    """As `read_incarnation`, asked several times: each request of ours has a connection of its own.

    Raises:
        EngineError: not every answer is of the same server; also as `read_incarnation`.
    """
    answers = [read_incarnation(channel, timeout_seconds=timeout_seconds) for _ in range(_ASKED_AT_CONNECT)]
    if len(set(answers)) > 1:
        raise EngineError(
            f"Not one server answers at {channel.url}: asked {len(answers)} times which one it is, it gave "
            f"{len(set(answers))} answers.",
            "Behind a load balancer each request reaches another server, so that each would hold a part of "
            "the weights, and every request would succeed.",
            "Name each server by its own address, as a replica of its own.",
        )
    return answers[0]


def version_number(weight_version: str | None) -> int | None:
    """The version as the number that a lane publishes, None where an operator wrote something else."""
    return int(weight_version) if weight_version is not None and weight_version.isdecimal() else None


def _decode_arguments(answer: bytes) -> dict[str, str]:
    everything = decoded(answer, dict[str, msgspec.Raw], SERVER_INFO_ROUTE)
    found: dict[str, str] = {}
    for name in LAUNCH_ARGUMENTS_READ:
        value = msgspec.json.decode(everything[name]) if name in everything else None
        if value is not None and value != []:
            found[name] = _as_text(value)
    return found


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(sorted(str(item) for item in value))  # some are sets, in an order of their own
    return str(value).lower() if isinstance(value, bool) else str(value)


_Shape = TypeVar("_Shape")


def decoded(answer: bytes, shape: type[_Shape], route: str) -> _Shape:
    """An answer of the server's as the shape that is looked for; raises EngineError where it has another."""
    try:
        return msgspec.json.decode(answer, type=shape)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(
            f"The answer to {route} has another shape than SGLang's: {error}.",
            f"It begins with {quoted(answer[:200])}.",
        ) from error
