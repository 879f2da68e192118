from __future__ import annotations

import threading

import pytest
from fake_engine import FakeWorkerEngine, ask, attached

from weightlane import agent_turns
from weightlane.errors import SyncTimeoutError
from weightlane.messages import GetResidency


def test_a_message_behind_one_that_hangs_is_answered_with_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeWorkerEngine()
    agent = attached(engine)
    entered, leave = threading.Event(), threading.Event()

    def hang() -> str:
        entered.set()
        leave.wait(10)
        return "first"

    monkeypatch.setattr(engine, "current_incarnation", hang)
    thread = threading.Thread(target=ask, args=(agent, GetResidency("fake", "lane-1")))
    thread.start()
    assert entered.wait(10)
    monkeypatch.setattr(agent_turns, "_BUSY_SECONDS", 0.05)
    with pytest.raises(SyncTimeoutError, match="still at GetResidency"):
        ask(agent, GetResidency("fake", "lane-1"))
    leave.set()
    thread.join(10)
    assert ask(agent, GetResidency("fake", "lane-1")).plan_digest == "p1"
