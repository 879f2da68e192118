from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from weightlane import messages
from weightlane.errors import EngineDeadError, SyncTimeoutError
from weightlane.front.client import FrontEndpoint

if TYPE_CHECKING:
    from weightlane.front.process import FrontProcess


@pytest.mark.requirement("R64")
def test_a_server_killed_in_mid_call_ends_the_call_at_once_and_names_it(
    own_front: FrontProcess,
) -> None:
    endpoint = FrontEndpoint(own_front.address, 10.0)
    killer = threading.Timer(0.5, own_front.process.kill)
    killer.start()
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"{own_front.address} is gone; the call was call_workers"):
        endpoint.call_workers(messages.encode(messages.Detach("slow")), 60.0)
    assert time.monotonic() - started < 3.0
    killer.join()
    with pytest.raises(EngineDeadError, match="the call was facts"):
        endpoint.facts()


@pytest.mark.requirement("R64")
def test_a_server_that_hangs_is_waited_for_no_longer_than_the_bound(own_front: FrontProcess) -> None:
    endpoint = FrontEndpoint(own_front.address, 0.5)
    os.kill(own_front.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(SyncTimeoutError, match=r"facts to unix:.* got no answer within 0\.5 s"):
        endpoint.facts()
    assert time.monotonic() - started < 2.0


def test_nobody_there_is_an_engine_dead_error(address: str) -> None:
    with pytest.raises(EngineDeadError, match=r"FileNotFoundError|refused"):
        FrontEndpoint(address, 1.0).facts()
