"""An adapter for an engine that takes requests only: gathered and swapped by the controller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fake_adapter_engine import CONFIG, MODULES, NAMES, plan, values

from weightlane.adapter_check import binding_problems
from weightlane.adapter_requests import RequestedAdapter, adapter_by_request
from weightlane.adapters import AdapterBinding, AdapterRef, BoundModule
from weightlane.errors import EngineError, SyncError, VerificationError
from weightlane.messages import ReceiveReport
from weightlane.program import AdapterMove, AgentMove
from weightlane.verify import _binding, with_binding

if TYPE_CHECKING:
    from weightlane.adapter_engine import AdapterLoad
    from weightlane.adapters import SwapPolicy

MOVE = AdapterMove("/load", "tensors", 1, "{}")


class FakeAdapterEndpoint:
    """Holds adapters by name, as an engine behind requests does."""

    address = "http://fake"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tensors: dict[str, Any] = {}
        self.held: list[bool] = []
        self.refuses = ""
        self.unread = ""
        self.loses: tuple[str, ...] = ()

    def load_adapter(self, move: AdapterMove, load: AdapterLoad, *, held: bool) -> AdapterBinding:
        assert move == MOVE
        self.calls.append(f"load {load.ref.name}")
        self.held.append(held)
        if self.refuses:
            raise EngineError(self.refuses)
        self.tensors[load.ref.name] = load.tensors
        bound = [BoundModule(name, CONFIG.rank, CONFIG.scaling) for name in MODULES if name not in self.loses]
        return AdapterBinding(load.ref, () if self.unread else tuple(bound), self.unread)

    def serve_adapter(self, ref: AdapterRef) -> None:
        self.calls.append(f"serve {ref.name}")

    def remove_adapter(self, ref: AdapterRef) -> None:
        self.calls.append(f"remove {ref.name}")
        del self.tensors[ref.name]


def requested(endpoint: Any, swap: SwapPolicy = "two_slot") -> RequestedAdapter:
    fake_plan: Any = SimpleNamespace(receive_plan=lambda number, rings: plan(swap))
    return RequestedAdapter(fake_plan, 0, endpoint, MOVE)


def sync(adapter: RequestedAdapter, version: int) -> AdapterBinding:
    adapter.begin()
    for name, tensor in values(version).items():
        adapter.gathered(name, tensor)
    return adapter.load(version, held=False)


@pytest.fixture
def endpoint() -> FakeAdapterEndpoint:
    return FakeAdapterEndpoint()


def test_two_slots_load_and_serve_the_new_one_before_the_old_one_is_removed(
    endpoint: FakeAdapterEndpoint,
) -> None:
    adapter = requested(endpoint)
    for version in (1, 2):
        sync(adapter, version)
        adapter.publish()
    assert endpoint.calls == [
        *("load policy@1", "serve policy@1"),
        *("load policy@2", "serve policy@2", "remove policy@1"),
    ]
    assert list(endpoint.tensors["policy@2"]) == list(NAMES)
    assert adapter.serves_as_before


def test_under_one_name_the_old_one_goes_first_and_nothing_serves_until_it_is_published(
    endpoint: FakeAdapterEndpoint,
) -> None:
    adapter = requested(endpoint, "paused")
    sync(adapter, 1)
    adapter.publish()
    assert adapter.serves_as_before
    sync(adapter, 2)
    assert endpoint.calls[-2:] == ["remove policy", "load policy"]
    assert not adapter.serves_as_before
    adapter.publish()
    assert endpoint.calls[-1] == "serve policy"


def test_what_is_gathered_is_a_copy_and_a_sync_that_begins_forgets_the_one_before(
    endpoint: FakeAdapterEndpoint,
) -> None:
    adapter, made = requested(endpoint), values(1)
    adapter.gathered(NAMES[0], made[NAMES[0]])  # of a sync that failed in the middle
    adapter.begin()
    for name, tensor in made.items():
        adapter.gathered(name, tensor)
        tensor.zero_()
    adapter.load(1, held=True)
    sent = endpoint.tensors["policy@1"]
    assert all((sent[name] == value).all() for name, value in values(1).items())
    assert endpoint.held == [True]


def test_a_matrix_that_never_came_sends_nothing(endpoint: FakeAdapterEndpoint) -> None:
    adapter = requested(endpoint)
    adapter.begin()
    adapter.gathered(NAMES[0], values(1)[NAMES[0]])
    with pytest.raises(SyncError, match="incomplete"):
        adapter.load(1, held=False)
    assert endpoint.calls == []


def test_a_refused_load_leaves_the_old_one_and_the_next_sync_goes_on(endpoint: FakeAdapterEndpoint) -> None:
    adapter = requested(endpoint)
    sync(adapter, 1)
    adapter.publish()
    endpoint.refuses = "no"
    with pytest.raises(EngineError, match="no"):
        sync(adapter, 2)
    adapter.discard()
    assert (list(endpoint.tensors), adapter.serves_as_before) == (["policy@1"], True)
    endpoint.refuses = ""
    sync(adapter, 3)
    adapter.publish()
    assert list(endpoint.tensors) == ["policy@3"]


def test_a_partial_binding_is_an_error_and_is_taken_out(endpoint: FakeAdapterEndpoint) -> None:
    adapter = requested(endpoint)
    endpoint.loses = MODULES[1:2]
    with pytest.raises(VerificationError, match="bound to 2 of 3 modules"):
        sync(adapter, 1)
    adapter.discard()
    assert endpoint.tensors == {}


def test_what_was_staged_and_not_published_goes_with_the_next_sync(endpoint: FakeAdapterEndpoint) -> None:
    adapter = requested(endpoint)
    sync(adapter, 1)
    sync(adapter, 2)
    adapter.publish()
    assert list(endpoint.tensors) == ["policy@2"]


def test_a_binding_that_nobody_read_is_told_in_the_report_and_taken_from_no_agent(
    endpoint: FakeAdapterEndpoint,
) -> None:
    endpoint.unread = "nobody is there"
    binding = sync(requested(endpoint), 1)
    assert binding_problems(CONFIG, AdapterRef("policy@1", 1), binding) == []
    assert binding_problems(CONFIG, AdapterRef("policy@2", 2), binding) != []
    known: Any = SimpleNamespace(manifest=SimpleNamespace(adapter=CONFIG))
    report: Any = SimpleNamespace(replica=0, address="there", workers=(), read_back=())
    assert "not read back: nobody is there" in with_binding(report, known, binding).verified
    whole = AdapterBinding(binding.ref, tuple(BoundModule(name, 2, 2.0) for name in MODULES))
    assert "bound to 3 of 3 modules" in with_binding(report, known, whole).verified
    from_agent: Any = SimpleNamespace(adapter=binding, version=1, spec=ReceiveReport)
    replica: Any = SimpleNamespace(adapter=SimpleNamespace(swap="two_slot"))
    assert _binding(known, replica, from_agent) == ["it did not read back adapter policy: nobody is there"]


def test_only_a_program_that_carries_adapters_in_requests_has_one(endpoint: FakeAdapterEndpoint) -> None:
    def of(move: Any, given: Any) -> Any:
        replica = SimpleNamespace(program=SimpleNamespace(move=move))
        known: Any = SimpleNamespace(replicas=[replica], receive_plan=lambda number, rings: plan())
        return adapter_by_request(known, 0, given)

    assert of(AgentMove("inline"), endpoint) is None
    assert isinstance(of(MOVE, endpoint), RequestedAdapter)
    with pytest.raises(EngineError, match="has no load_adapter"):
        of(MOVE, SimpleNamespace(address="there"))
