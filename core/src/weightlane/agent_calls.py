"""Calling every worker's agent of one replica and reading all answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from weightlane.errors import ProtocolError
from weightlane.failures import Failure, error_of
from weightlane.messages import AgentReply, AgentRequest, decode, encode

if TYPE_CHECKING:
    from weightlane.endpoint import EngineEndpoint

_T = TypeVar("_T")


def call_agents(
    endpoint: EngineEndpoint,
    request: AgentRequest,
    kind: type[_T] | tuple[type[_T], ...],
    *,
    workers: int,
    seconds: float,
) -> list[_T]:
    """One answer per worker, in worker order; `kind` is what each must be, or several that it may be.

    Raises:
        WeightlaneError: the first worker's failure, as the typed error it was.
        ProtocolError: another number or another kind of answers than asked for.
    """
    replies = endpoint.call_workers(encode(request), seconds)
    if len(replies) != workers:
        raise ProtocolError(
            f"{endpoint.address} answered {type(request).__name__} with {len(replies)} replies.",
            f"The plan knows {workers} workers.",
            "The engine was restarted with another size; connect again.",
        )
    kinds = kind if isinstance(kind, tuple) else (kind,)
    answers: list[_T] = []
    for worker, data in enumerate(replies):
        reply: AgentReply = decode(data, AgentReply, sender=f"worker {worker} of {endpoint.address}")
        if isinstance(reply, Failure):
            raise error_of(reply)
        if not isinstance(reply, kinds):
            raise ProtocolError(
                f"Worker {worker} of {endpoint.address} answered {type(request).__name__} with "
                f"{type(reply).__name__}, not {' or '.join(item.__name__ for item in kinds)}."
            )
        answers.append(reply)
    return answers
