"""A question to our loader beside a lane that syncs, where a server has one session for all (0.5.21 on)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from weightlane.errors import EngineError
from weightlane_sglang import empty_session, loader_channel, run_folder, session
from weightlane_sglang.contract import BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE, UPDATE_ROUTE
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from weightlane.facts import EngineFacts
    from weightlane_sglang.payload import PayloadPlace

BOUND = 60.0
EACH = 0.02
"""What a request takes at least, so that nothing goes on for ever where no time passes."""


@dataclass
class FakeClock:
    """Moves where something waits."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeServer:
    """A channel to a server of update sessions, with a lane that comes and goes between two requests.

    `holder` is who has the session open. `before` is called with each route, before the server looks at the
    request, and `takes` gives the share of its bound that each route needs.
    """

    clock: FakeClock
    holder: str = ""
    before: Callable[[str], None] = lambda route: None
    takes: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = "http://fake"

    def send(
        self, method: str, route: str, *, timeout_seconds: float, body: Iterable[bytes], length: int
    ) -> bytes:
        assert method == "POST"
        assert sum(map(len, body)) == length
        return self._answer(route, timeout_seconds)

    def send_tensors(
        self, route: str, tensors: object, *, place: PayloadPlace, body: str, timeout_seconds: float
    ) -> bytes:
        assert tensors
        assert place.field not in body
        return self._answer(route, timeout_seconds)

    def _answer(self, route: str, timeout_seconds: float) -> bytes:
        assert timeout_seconds > 0
        self.asked.append(route)
        self.clock.sleep(EACH + self.takes.get(route, 0.0) * timeout_seconds)
        self.before(route)
        refusal = {
            BEGIN_UPDATE_ROUTE: "a weight-update session is already open" if self.holder else "",
            UPDATE_ROUTE: "" if self.holder else "update_weights_from_tensor must run between begin and end",
            END_UPDATE_ROUTE: "" if self.holder else "no weight-update session is open",
        }[route]
        if refusal:
            raise EngineError(f"SGLang answered POST {route} with status 400: {refusal}")
        if route != UPDATE_ROUTE:
            self.holder = "question" if route == BEGIN_UPDATE_ROUTE else ""
        return b"{}"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    for module in (empty_session, session, run_folder):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def ask(
    session_facts: EngineFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[FakeServer], None]:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))

    def carry(server: FakeServer) -> None:
        loader_channel.carry(server, session_facts, b"?", loader="a.loader", timeout_seconds=BOUND)  # type: ignore[arg-type]

    return carry


def once(route: str, then: Callable[[], None]) -> Callable[[str], None]:
    """Calls `then` before the first request of this route."""
    left = [then]
    return lambda asked: left.pop()() if asked == route and left else None


def test_a_lane_that_ends_its_session_meanwhile_costs_an_attempt(
    clock: FakeClock, ask: Callable[[FakeServer], None]
) -> None:
    server = FakeServer(clock, holder="lane")
    server.before = once(UPDATE_ROUTE, lambda: setattr(server, "holder", ""))
    ask(server)
    first, second = [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE], [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE, END_UPDATE_ROUTE]
    assert server.asked == first + second
    assert server.holder == ""


def test_without_a_second_attempt_that_lane_would_fail_the_question(
    clock: FakeClock, ask: Callable[[FakeServer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(empty_session, "_RETRY_SECONDS", 0.0)
    server = FakeServer(clock, holder="lane")
    server.before = once(UPDATE_ROUTE, lambda: setattr(server, "holder", ""))
    with pytest.raises(EngineError, match="no session open"):
        ask(server)


def test_a_lane_that_always_ends_its_session_is_told_of_and_keeps_it(
    clock: FakeClock, ask: Callable[[FakeServer], None]
) -> None:
    server = FakeServer(clock)

    def sync(route: str) -> None:
        server.holder = "" if route == UPDATE_ROUTE else "lane"

    server.before = sync
    with pytest.raises(EngineError, match=r"Find the lane or the plan.*at the same time") as caught:
        ask(server)
    assert f"{server.asked.count(UPDATE_ROUTE)} times" in str(caught.value)
    assert END_UPDATE_ROUTE not in server.asked
    assert clock.now - 1000 < session.OTHERS_SECONDS + 1


def taken_over(clock: FakeClock) -> FakeServer:
    """A server that answers a question late, when a lane has waited for its session, and ended it."""
    server = FakeServer(clock)

    def late() -> None:
        clock.sleep(session.OTHERS_SECONDS + 1)
        server.holder = "lane"

    server.before = once(UPDATE_ROUTE, late)
    return server


def test_a_session_held_for_long_is_not_ended_since_it_may_be_a_lane_s(
    clock: FakeClock, ask: Callable[[FakeServer], None]
) -> None:
    server = taken_over(clock)
    ask(server)
    assert server.holder == "lane"


def test_were_it_ended_the_lane_would_lose_the_session_of_its_sync(
    clock: FakeClock, ask: Callable[[FakeServer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(empty_session, "_OWN_SECONDS", BOUND)
    server = taken_over(clock)
    ask(server)
    assert server.holder == ""


@pytest.mark.parametrize(
    "takes",
    [
        {BEGIN_UPDATE_ROUTE: 0.9, UPDATE_ROUTE: 0.9, END_UPDATE_ROUTE: 0.9},
        {BEGIN_UPDATE_ROUTE: 1.0},
        {UPDATE_ROUTE: 1.0},
        {},
    ],
)
def test_all_steps_together_keep_within_the_bound(
    clock: FakeClock, ask: Callable[[FakeServer], None], takes: dict[str, float]
) -> None:
    """The last wait, for answers that nobody writes, is part of it."""
    began, refused = clock.now, False
    try:
        ask(FakeServer(clock, takes=takes))
    except EngineError as error:
        refused = "within 60 s" in error.what
    assert refused == (takes.get(BEGIN_UPDATE_ROUTE) == 1.0)
    assert clock.now - began <= BOUND + 3 * EACH
