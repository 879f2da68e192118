"""Before 0.5.10 a server that generated nothing yet tells nothing of itself; one token mends that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.errors import EngineDeadError, EngineError
from weightlane_sglang import unread_replies
from weightlane_sglang.http_channel import HttpChannel
from weightlane_sglang.server_facts import read_facts, read_incarnation

if TYPE_CHECKING:
    from collections.abc import Callable

GENERATE = "/generate"
DESCRIPTION = "/server_info"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_replies, "SILENT_SECONDS", 0.3)


@pytest.fixture
def silent_server(fake_server: Any, answer: Callable[..., Any]) -> Any:
    """As 0.5.8 with `--skip-server-warmup`: mute about itself until it was asked for a token."""
    document = dict(fake_server.answers["/openapi.json"].body)
    document["paths"] = {**document["paths"], "/flush_cache": {"post": {}}}
    fake_server.answers["/openapi.json"] = answer(document)
    told = fake_server.answers[DESCRIPTION]
    fake_server.answers[DESCRIPTION] = answer({}, after_seconds=30.0)

    def generate(body: bytes) -> list[Any]:
        fake_server.answers[DESCRIPTION] = told
        return []

    fake_server.answers[GENERATE] = answer(generate)
    return fake_server


def test_it_is_asked_for_one_token_and_then_tells(silent_server: Any) -> None:
    with HttpChannel(silent_server.url) as channel:
        started = time.monotonic()
        assert read_facts(channel, timeout_seconds=10).version == "0.5.18"
        assert time.monotonic() - started < 5
        assert read_incarnation(channel, timeout_seconds=10)
    (body,) = silent_server.bodies(GENERATE)
    assert body["sampling_params"]["max_new_tokens"] == 1


def test_a_restarted_one_is_asked_again_when_a_sync_looks_who_it_is(silent_server: Any) -> None:
    with HttpChannel(silent_server.url) as channel:
        assert read_incarnation(channel, timeout_seconds=10)
    assert len(silent_server.bodies(GENERATE)) == 1


def test_where_the_token_does_not_come_either_the_error_names_the_argument(
    silent_server: Any, answer: Callable[..., Any]
) -> None:
    silent_server.answers[GENERATE] = answer({}, after_seconds=30.0)
    with HttpChannel(silent_server.url) as channel, pytest.raises(EngineError) as caught:
        read_incarnation(channel, timeout_seconds=1)
    assert "--skip-server-warmup" in str(caught.value)


def test_a_later_server_that_is_slow_is_asked_for_no_token(
    fake_server: Any, answer: Callable[..., Any]
) -> None:
    """The control: since 0.5.10, whose flush takes a timeout, silence has other causes."""
    fake_server.answers[DESCRIPTION] = answer({}, after_seconds=30.0)
    with HttpChannel(fake_server.url) as channel, pytest.raises(EngineError, match=DESCRIPTION):
        read_incarnation(channel, timeout_seconds=1)
    assert not fake_server.bodies(GENERATE)


def test_a_server_that_is_gone_is_asked_nothing_more(fake_server: Any, answer: Callable[..., Any]) -> None:
    fake_server.answers[DESCRIPTION] = answer(hang_up=True)
    with HttpChannel(fake_server.url) as channel, pytest.raises(EngineDeadError):
        read_incarnation(channel, timeout_seconds=1)
    assert [path for _, path, _ in fake_server.requests] == [DESCRIPTION]
