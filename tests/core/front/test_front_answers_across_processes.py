from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from weightlane import messages
from weightlane.endpoint import EngineEndpoint
from weightlane.errors import EngineError, SyncError
from weightlane.program import EngineCall, RequestMove

if TYPE_CHECKING:
    from weightlane.front.client import FrontEndpoint


def test_every_request_reaches_the_engine_and_returns(endpoint: FrontEndpoint) -> None:
    assert isinstance(endpoint, EngineEndpoint)
    assert endpoint.facts().engine == "fake"
    assert endpoint.generate([[5, 6], [7, 8]], max_tokens=1) == (
        messages.Generation((5,), (-0.5,), 7),
        messages.Generation((7,), (-0.5,), 7),
    )
    assert endpoint.call(EngineCall("reset_prefix_cache")) == "reset_prefix_cache"
    replies = endpoint.call_workers(messages.encode(messages.Detach("lane")), 5.0)
    assert [messages.decode(data, messages.AgentReply, sender="test") for data in replies] == [
        messages.Done(0),
        messages.Done(1),
    ]


def test_a_typed_error_keeps_its_type_and_a_foreign_one_its_traceback(endpoint: FrontEndpoint) -> None:
    with pytest.raises(SyncError, match=r"what happened\..* why it did\. how to mend it\.") as typed:
        endpoint.call(EngineCall("typed"))
    assert "raise SyncError" in typed.value.remote_traceback  # type: ignore[attr-defined]
    with pytest.raises(
        EngineError, match=r"ValueError: the engine's own words \(from front unix:"
    ) as foreign:
        endpoint.call(EngineCall("boom"))
    assert 'raise ValueError("the engine' in foreign.value.remote_traceback  # type: ignore[attr-defined]


def test_a_workers_failure_is_raised_by_describe_workers(endpoint: FrontEndpoint) -> None:
    with pytest.raises(EngineError, match="no backend nobody's"):
        endpoint.describe_workers("nobody's")


def test_a_long_worker_call_keeps_no_other_call_waiting_and_close_ends_it(endpoint: FrontEndpoint) -> None:
    errors: list[BaseException] = []

    def slow() -> None:
        try:
            endpoint.call_workers(messages.encode(messages.Detach("slow")), 30.0)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    time.sleep(0.3)
    started = time.monotonic()
    endpoint.facts()
    assert time.monotonic() - started < 2.0
    assert thread.is_alive()
    endpoint.close()
    thread.join(2.0)
    assert not thread.is_alive()
    assert "this endpoint was closed during the call" in str(errors[0])
    with pytest.raises(EngineError, match="this endpoint was closed"):
        endpoint.facts()


def test_requests_a_front_cannot_carry_are_refused_by_name(endpoint: FrontEndpoint) -> None:
    with pytest.raises(EngineError, match=r"'sleep'.*has fields: \{\"level\":1\}"):
        endpoint.call(EngineCall("sleep", body='{"level":1}'))
    move = RequestMove("/update", "tensors", 1, "{}", "{}")
    with pytest.raises(EngineError, match=r"takes no bucket requests \(/update\).*has an agent"):
        endpoint.send_bucket(move, [], last=True, version=1)


def test_front_and_client_load_no_torch() -> None:
    code = "import sys, weightlane.front.server, weightlane.front.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
