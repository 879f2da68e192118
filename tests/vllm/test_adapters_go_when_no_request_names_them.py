"""The turnover of adapters over stand-ins: what is waited for, aborted, refused and emptied, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError
from weightlane.messages import decode, encode
from weightlane_vllm.adapter_turnover import AdapterTurnover
from weightlane_vllm.served_adapters import AskAdapters, ServedAdapters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

ONE, TWO, IN_PLACE = AdapterRef("default@1", 1), AdapterRef("default@2", 2), AdapterRef("default", 2)


class FakeRequests:
    """Which adapter each request names."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self.served_before: set[str] = set()
        self.admitted: list[str] = []

    def naming(self, names: Collection[str]) -> list[str]:
        return [number for number, name in self.running.items() if name in names]

    def naming_none_of(self, names: Collection[str]) -> list[str]:
        return [number for number, name in self.running.items() if name not in names]

    def admit_only(self, names: Collection[str]) -> None:
        self.admitted = list(names)


class FakeCalls:
    """Two workers that tell what they are given to tell."""

    def __init__(self) -> None:
        self.requests = FakeRequests()
        self.told = ServedAdapters((ONE,))
        self.released: list[str] = []
        self.resets = 0

    def collective_rpc(self, what: str, method: str, arguments: tuple[Any, ...], seconds: float) -> list[Any]:
        asked: AskAdapters = decode(arguments[0], AskAdapters, sender="test")
        assert asked.removals == "when-released"
        self.released += asked.release
        kept = tuple(ref for ref in self.told.kept if ref.name not in asked.release)
        self.told = ServedAdapters(self.told.adapters, self.told.loaded, kept)
        return [encode(self.told)] * 2

    def with_requests(self, what: str, function: Callable[[Any], Any], seconds: float) -> Any:
        return function(self.requests)

    def admit_adapters(self, names: Collection[str], seconds: float) -> None:
        self.requests.admit_only(names)

    def abort(self, choose: Callable[[Any], list[str]], seconds: float) -> int:
        numbers = choose(self.requests)
        for number in numbers:
            del self.requests.running[number]
        return len(numbers)

    def reset_prefix_cache_of_running(self, seconds: float) -> bool:
        self.resets += 1
        return True


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls()


@pytest.fixture
def turnover(calls: FakeCalls) -> AdapterTurnover:
    stand_in: Any = calls
    return AdapterTurnover(stand_in, 1.0)


def publish(turnover: AdapterTurnover, calls: FakeCalls, ref: AdapterRef, *kept: AdapterRef) -> None:
    calls.told = ServedAdapters(calls.told.adapters, (ref,), calls.told.kept)
    turnover.before_publish(0.1)
    calls.told = ServedAdapters((ref,), (), kept)
    turnover.after_publish(1.0)


def test_an_old_one_that_nobody_names_goes_with_the_publication(
    calls: FakeCalls, turnover: AdapterTurnover
) -> None:
    publish(turnover, calls, TWO, ONE)
    assert calls.released == ["default@1"]
    assert calls.requests.admitted == ["default@2"]
    assert calls.resets == 0, "no prefix was ever cached under the new name"
    assert turnover.publishes_beside


def test_one_that_a_request_names_stays_until_it_has_ended(
    calls: FakeCalls, turnover: AdapterTurnover
) -> None:
    calls.requests.running = {"r": "default@1"}
    publish(turnover, calls, TWO, ONE)
    assert calls.released == []
    assert calls.requests.admitted == ["default@2"], "new requests are refused it already"
    with pytest.raises(EngineError, match=r"1 request still named default@1 after 0\.1 s"):
        turnover.drain(0.1)
    assert calls.released == []
    calls.requests.running.clear()
    turnover.drain(0.1)
    assert calls.released == ["default@1"]


def test_by_abort_the_request_ends_and_the_adapter_goes(calls: FakeCalls, turnover: AdapterTurnover) -> None:
    calls.requests.running = {"r": "default@1"}
    publish(turnover, calls, TWO, ONE)
    calls.requests.running["s"] = "default@2"
    turnover.abort(1.0)
    assert calls.requests.running == {"s": "default@2"}
    assert calls.released == ["default@1"]


def test_a_name_that_is_published_again_is_waited_for_and_its_prefixes_go(
    calls: FakeCalls, turnover: AdapterTurnover
) -> None:
    publish(turnover, calls, TWO)
    calls.requests.running = {"r": "default@2"}
    with pytest.raises(EngineError, match="The adapter is published again"):
        publish(turnover, calls, TWO)
    calls.requests.running.clear()
    publish(turnover, calls, TWO)
    assert calls.resets == 1


def test_a_name_that_never_changes_is_nobody_s_to_wait_for(
    calls: FakeCalls, turnover: AdapterTurnover
) -> None:
    """The engine pauses, so that its requests are drained, aborted or frozen, or wait to begin."""
    calls.requests.running = {"waiting": "default"}
    publish(turnover, calls, IN_PLACE)
    publish(turnover, calls, IN_PLACE)
    assert not turnover.publishes_beside


def test_requests_that_waited_and_name_what_a_base_dropped_end(
    calls: FakeCalls, turnover: AdapterTurnover
) -> None:
    calls.requests.running = {"waiting": "default@1", "other": "default@2"}
    calls.told = ServedAdapters((TWO,))
    assert turnover.before_resume(1.0) == 1
    assert calls.requests.running == {"other": "default@2"}
