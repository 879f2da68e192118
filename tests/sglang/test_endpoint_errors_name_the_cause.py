"""Whatever goes wrong on the wire is a typed error, soon, in the server's own words."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightlane as wl
from weightlane.contexts import EndpointContext, RolloutTarget
from weightlane.errors import EngineDeadError, EngineError
from weightlane.program import EngineCall, RequestMove
from weightlane_sglang import plugin
from weightlane_sglang.endpoint import SglangEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

UPDATE = "/update_weights_from_tensor"


def move(copies: int = 2) -> RequestMove:
    return RequestMove(
        UPDATE, "serialized_named_tensors", copies, '{"flush_cache":false}', '{"flush_cache":true}', 5.0
    )


@pytest.fixture
def endpoint(fake_server: Any) -> Iterator[SglangEndpoint]:
    handle = SglangEndpoint(RolloutTarget("sglang", address=fake_server.url), timeout_seconds=5)
    yield handle
    handle.close()


@pytest.mark.requirement("R35", part="in the error itself, sync")
def test_an_error_body_reaches_the_caller_cut_to_size(
    fake_server: Any, endpoint: SglangEndpoint, answer: Any
) -> None:
    fake_server.answers["/pause_generation"] = answer({"detail": "mode: no such " + "x" * 9000}, status=422)
    with pytest.raises(EngineError, match="mode: no such") as caught:
        endpoint.call(EngineCall("/pause_generation", '{"mode":"bogus"}'))
    text = str(caught.value)
    assert "POST /pause_generation" in text
    assert "422" in text
    assert 1500 < len(text) < 2600


def test_a_route_that_is_not_there_is_named(endpoint: SglangEndpoint) -> None:
    with pytest.raises(EngineError, match=r"POST /no_such_route with status 404.*Not Found"):
        endpoint.call(EngineCall("/no_such_route"))


@pytest.mark.requirement("R64")
def test_success_false_is_an_error_with_status_200(
    fake_server: Any, endpoint: SglangEndpoint, answer: Any
) -> None:
    fake_server.answers[UPDATE] = answer({"success": False, "message": "weights are shared"})
    with pytest.raises(EngineError, match="weights are shared"):
        endpoint.send_bucket(move(), [("a", torch.ones(2))], last=True, version=1)
    fake_server.answers[UPDATE] = answer({"success": True, "message": "Success"})
    endpoint.send_bucket(move(), [("a", torch.ones(2))], last=True, version=1)


@pytest.mark.requirement("R82")
def test_a_failed_flush_is_an_error(fake_server: Any, endpoint: SglangEndpoint, answer: Any) -> None:
    fake_server.answers["/flush_cache?timeout=30"] = answer(b"Timed out waiting for idle state.", status=400)
    with pytest.raises(EngineError, match="Timed out waiting for idle state"):
        endpoint.call(EngineCall("/flush_cache?timeout=30"))


def test_a_lost_connection_names_this_request_and_the_one_before(
    fake_server: Any, endpoint: SglangEndpoint, answer: Any
) -> None:
    fake_server.answers["/pause_generation"] = answer({"status": "ok"})
    fake_server.answers[UPDATE] = answer(hang_up=True)
    endpoint.call(EngineCall("/pause_generation"))
    with pytest.raises(EngineDeadError, match=UPDATE) as caught:
        endpoint.send_bucket(move(), [("a", torch.ones(2))], last=True, version=1)
    assert "The last request it answered was POST /pause_generation" in str(caught.value)


def test_nobody_listening_is_a_dead_engine_soon() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = RolloutTarget("sglang", address=f"http://127.0.0.1:{taken.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="no connection can be made"):
            plugin.weightlane_open_endpoint(
                EndpointContext(plugin.weightlane_register_backends()[0], target, 5.0)
            )
        assert time.monotonic() - started < 5


@pytest.mark.requirement("R64")
def test_an_answer_that_is_late_is_told_apart_from_a_dead_server(
    fake_server: Any, endpoint: SglangEndpoint, answer: Any
) -> None:
    fake_server.answers["/slow"] = answer({}, after_seconds=20)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"within 1 s") as caught:
        endpoint.call(EngineCall("/slow", timeout_seconds=1.0))
    assert not isinstance(caught.value, EngineDeadError)
    fake_server.answers["/model_info"] = answer(hang_up=True)
    with pytest.raises(EngineDeadError, match="nor /model_info since"):
        endpoint.call(EngineCall("/slow", timeout_seconds=1.0))
    assert time.monotonic() - started < 10


def test_close_ends_a_call_that_runs_in_another_thread(
    fake_server: Any, endpoint: SglangEndpoint, answer: Any
) -> None:
    fake_server.answers["/slow"] = answer({}, after_seconds=20)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            endpoint.call(EngineCall("/slow", timeout_seconds=10.0))
        except EngineError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not fake_server.requests:
        time.sleep(0.01)
    time.sleep(0.1)
    endpoint.close()
    endpoint.close()
    thread.join(3)
    assert len(caught) == 1, "it would else run into its own bound of 10 s"
    assert "handle was closed" in str(caught[0])
    with pytest.raises(EngineError, match="closed"):
        endpoint.call(EngineCall("/slow"))


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "unix:/tmp/x", "ftp://host/", "http://", ""])
def test_an_address_that_is_no_url_is_refused(address: str) -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:30000"):
        SglangEndpoint(RolloutTarget("sglang", address=address), timeout_seconds=5)


def test_a_redirect_is_not_followed(fake_server: Any, endpoint: SglangEndpoint, answer: Any) -> None:
    fake_server.answers["/flush_cache"] = answer({}, status=307)
    with pytest.raises(EngineError, match="307"):
        endpoint.call(EngineCall("/flush_cache"))


def test_agents_are_told_that_there_is_none(endpoint: SglangEndpoint) -> None:
    with pytest.raises(EngineError, match="no worker agent"):
        endpoint.call_workers(b"", 1.0)


def test_the_version_goes_as_text_in_the_field_of_the_plan(
    fake_server: Any, endpoint: SglangEndpoint, answer: Any
) -> None:
    fake_server.answers["/update_weight_version"] = answer({"success": True})
    call = EngineCall("/update_weight_version", '{"abort_all_requests":false}', version_field="new_version")
    endpoint.call(call, version=12)
    assert fake_server.bodies("/update_weight_version") == [
        {"abort_all_requests": False, "new_version": "12"}
    ]
    with pytest.raises(EngineError, match="none was given"):
        endpoint.call(call)


def test_an_address_with_a_password_is_refused_and_shown_nowhere(fake_server: Any) -> None:
    address = fake_server.url.replace("http://", "http://user:hunter2@")
    with pytest.raises(EngineError, match="holds a user or a password") as caught:
        wl.connect(trainer=wl.trainer("torch", model={}), rollout=[wl.rollout("sglang", url=address)])
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__ or error.__context__
    assert fake_server.requests == []
