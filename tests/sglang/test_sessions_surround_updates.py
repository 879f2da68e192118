"""Updates in sessions (0.5.21 and later): what the program asks for, and when the endpoint opens one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightlane.contexts import BuildRequestsContext, RolloutTarget
from weightlane.errors import EngineError
from weightlane.program import RequestMove, with_lifecycle
from weightlane.types import Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.contract import BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE, UPDATE_ROUTE
from weightlane_sglang.endpoint import SglangEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.facts import EngineFacts
    from weightlane.program import Program

TENSORS = [("a", torch.ones(2))]
ALREADY = {"success": False, "message": "a weight-update session is already open; call end_weight_update()"}


@pytest.fixture
def program(session_facts: EngineFacts) -> Program:
    (descriptor,) = (
        item for item in plugin.weightlane_register_backends() if item.era == "updates-in-session"
    )
    context = BuildRequestsContext(
        descriptor, session_facts, Phase.FULL, TransportName.INLINE, (), (), (), "counts"
    )
    return with_lifecycle(
        plugin.weightlane_build_requests(context), plugin.weightlane_plan_lifecycle(context)
    )


@pytest.fixture
def move(program: Program) -> RequestMove:
    assert isinstance(program.move, RequestMove)
    return program.move


@pytest.fixture
def endpoint(fake_server: Any, answer: Any) -> Iterator[SglangEndpoint]:
    for route in (BEGIN_UPDATE_ROUTE, UPDATE_ROUTE, END_UPDATE_ROUTE):
        fake_server.answers[route] = answer({"success": True})
    made = SglangEndpoint(RolloutTarget("sglang", address=fake_server.url), timeout_seconds=10)
    yield made
    made.close()


def posts(fake_server: Any) -> list[str]:
    return [path for _, path, _ in fake_server.requests]


def send(endpoint: SglangEndpoint, move: RequestMove) -> None:
    endpoint.send_bucket(move, TENSORS, last=False, version=1)


def test_the_session_ends_after_the_last_bucket_and_before_the_flush(program: Program) -> None:
    assert [call.route for call in program.settle] == [END_UPDATE_ROUTE, "/flush_cache?timeout=30"]
    assert isinstance(program.move, RequestMove)
    for body in (program.move.body, program.move.last_body):
        assert json.loads(body)["selector"] == "target"
        assert json.loads(body)["flush_cache"] is False
    assert "disable_draft_model" not in program.move.body


def test_one_session_holds_all_buckets_of_a_sync_and_the_next_has_its_own(
    endpoint: SglangEndpoint, fake_server: Any, program: Program, move: RequestMove
) -> None:
    for _ in range(2):
        send(endpoint, move)
        send(endpoint, move)
        endpoint.call(program.settle[0])
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE, UPDATE_ROUTE, END_UPDATE_ROUTE] * 2


def test_a_sync_after_a_failed_one_goes_on_in_its_session(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, move: RequestMove
) -> None:
    fake_server.answers[UPDATE_ROUTE] = answer({"success": False}, status=400)
    with pytest.raises(EngineError):
        send(endpoint, move)
    fake_server.answers[UPDATE_ROUTE] = answer({"success": True})
    send(endpoint, move)
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE, UPDATE_ROUTE]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's session is not waited for."""
    monkeypatch.setattr("weightlane_sglang.session.OTHERS_SECONDS", 0.0)


def test_a_session_that_a_plan_from_beside_holds_is_left_to_it(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, move: RequestMove
) -> None:
    def beside(_: bytes) -> dict[str, object]:
        fake_server.answers[BEGIN_UPDATE_ROUTE] = answer({"success": True})
        return ALREADY

    fake_server.answers[BEGIN_UPDATE_ROUTE] = answer(beside, status=400)
    send(endpoint, move)
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, BEGIN_UPDATE_ROUTE, UPDATE_ROUTE]


@pytest.mark.usefixtures("impatient")
def test_a_session_that_a_dead_trainer_left_open_is_ended_first(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, move: RequestMove
) -> None:
    def ended(_: bytes) -> dict[str, bool]:
        fake_server.answers[BEGIN_UPDATE_ROUTE] = answer({"success": True})
        return {"success": True}

    fake_server.answers[BEGIN_UPDATE_ROUTE] = answer(ALREADY, status=400)
    fake_server.answers[END_UPDATE_ROUTE] = answer(ended)
    send(endpoint, move)
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE, BEGIN_UPDATE_ROUTE, UPDATE_ROUTE]


@pytest.mark.usefixtures("impatient")
def test_a_session_that_will_not_open_is_told_and_nothing_is_sent(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, move: RequestMove
) -> None:
    fake_server.answers[BEGIN_UPDATE_ROUTE] = answer(ALREADY, status=400)
    with pytest.raises(EngineError, match="opens no session"):
        send(endpoint, move)
    assert UPDATE_ROUTE not in posts(fake_server)


def test_a_sync_whose_session_somebody_ended_says_so_and_the_next_one_opens_another(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, move: RequestMove
) -> None:
    outside = {"success": False, "message": "an update must run between begin_weight_update() and end"}
    fake_server.answers[UPDATE_ROUTE] = answer(outside, status=400)
    with pytest.raises(EngineError, match="somebody else ended it"):
        send(endpoint, move)
    fake_server.answers[UPDATE_ROUTE] = answer({"success": True})
    send(endpoint, move)
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE] * 2


def test_after_an_end_that_fails_the_next_sync_opens_another(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, program: Program, move: RequestMove
) -> None:
    send(endpoint, move)
    fake_server.answers[END_UPDATE_ROUTE] = answer({"success": False, "message": "no session"}, status=400)
    with pytest.raises(EngineError, match="no session"):
        endpoint.call(program.settle[0])
    send(endpoint, move)
    assert posts(fake_server).count(BEGIN_UPDATE_ROUTE) == 2


@pytest.mark.usefixtures("impatient")
def test_a_session_that_ends_just_before_it_would_be_ended_is_as_good(
    endpoint: SglangEndpoint, fake_server: Any, answer: Any, move: RequestMove
) -> None:
    def ended(_: bytes) -> dict[str, object]:
        fake_server.answers[BEGIN_UPDATE_ROUTE] = answer({"success": True})
        return {"success": False, "message": "no weight-update session is open; call begin first"}

    fake_server.answers[BEGIN_UPDATE_ROUTE] = answer(ALREADY, status=400)
    fake_server.answers[END_UPDATE_ROUTE] = answer(ended, status=400)
    send(endpoint, move)
    assert posts(fake_server)[-1] == UPDATE_ROUTE


def test_an_era_without_sessions_opens_none(endpoint: SglangEndpoint, fake_server: Any) -> None:
    send(endpoint, RequestMove(UPDATE_ROUTE, "serialized_named_tensors", 1, "{}", "{}"))
    assert posts(fake_server) == [UPDATE_ROUTE]
