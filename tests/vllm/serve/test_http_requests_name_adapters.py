"""Names of adapters are in an OpenAI server's table exactly while its workers hold what they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sleeping_llm import FakeSleepingLlm, sleeping_facts

from weightlane import messages
from weightlane.adapters import AdapterRef
from weightlane_vllm.served_adapters import ServedAdapters
from weightlane_vllm.served_names import ServedNames
from weightlane_vllm.server_front import ServerFrontEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import FakeVllm


class FakeServedLlm(FakeSleepingLlm):
    """Its workers accept every message, and serve what the test says."""

    served: tuple[AdapterRef, ...] = ()

    def collective_rpc(self, method: str, args: tuple[bytes, ...] = ()) -> list[bytes]:
        if method == "weightlane_adapters":
            return [messages.encode(ServedAdapters(self.served)) for _ in self.workers]
        if method == "weightlane_agent" and b"describe" not in args[0]:
            return [messages.encode(messages.Done(worker.rank)) for worker in self.workers]
        return super().collective_rpc(method, args)


@pytest.fixture
def llm() -> FakeServedLlm:
    return FakeServedLlm(sleeping_facts(lora=True))


@pytest.fixture
def engine(llm: FakeServedLlm, fake_vllm: FakeVllm) -> Iterator[tuple[ServerFrontEngine, dict[str, Any]]]:
    names, table = ServedNames(), fake_vllm.OpenAIServingModels()
    names.add_table(table)
    engine = ServerFrontEngine(llm, backend="vllm", start_seconds=30.0, names=names)
    yield engine, table.lora_requests
    engine.detach()


def send(engine: ServerFrontEngine, request: Any) -> None:
    engine.call_workers(messages.encode(request), 10.0)


@pytest.mark.parametrize(("generation", "stays"), [("held", False), ("goes-on", True)])
def test_names_follow_what_the_workers_serve(
    engine: tuple[ServerFrontEngine, dict[str, Any]], llm: FakeServedLlm, generation: Any, stays: bool
) -> None:
    front, table = engine
    llm.served = (AdapterRef("default@1", 1),)
    send(front, messages.Publish("l", 1, 1))
    assert set(table) == {"default@1"}
    send(front, messages.BeginInline("l", "d", 2, 2, {0: "i0"}, generation=generation))
    assert set(table) == ({"default@1"} if stays else set())
    llm.served = (AdapterRef("default@2", 2),)
    send(front, messages.Publish("l", 2, 2))
    assert set(table) == {"default@2"}
    llm.served = ()
    send(front, messages.Detach("l"))
    assert not table


def test_a_sync_that_fails_leaves_what_is_still_served(
    engine: tuple[ServerFrontEngine, dict[str, Any]], llm: FakeServedLlm
) -> None:
    front, table = engine
    llm.served = (AdapterRef("default", 1),)
    send(front, messages.Publish("l", 1, 1))
    send(front, messages.BeginInline("l", "d", 2, 2, {0: "i0"}))
    send(front, messages.Cancel("l", 2, "a rank was lost"))
    assert set(table) == {"default"}
