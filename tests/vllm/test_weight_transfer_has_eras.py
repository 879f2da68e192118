"""The eras of vLLM's weight transfer: told from signatures of its releases, and what ours does in each."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightlane.errors import EngineError, SyncError, UsageError
from weightlane.probes import NotViable, Viable
from weightlane_vllm import sleep_watch
from weightlane_vllm.transfer_eras import era_of, facts_of, no_facts, probe_chunks, probe_sessions
from weightlane_vllm.transfer_sender import OfflineClient, WeightSender
from weightlane_vllm.transfer_worker import ChunkSession, making_worker, receiver_of

RELEASES: dict[str, Any] = json.loads(
    Path(__file__).with_name("data").joinpath("weight_transfer_signatures.json").read_text()
)
"""Methods and their parameters of vLLM's factory and base class, as its releases define them."""

SESSIONS = ("0.25.1", "0.27.1", "0.32.0")
CHUNKS = ("0.22.1", "0.23.0", "0.24.0")
NEITHER = ("0.16.0", "0.20.2", "0.21.0")


def class_with(methods: dict[str, list[str]]) -> type[Any]:
    def method(names: list[str]) -> Any:
        def call(*given: Any) -> None:
            raise AssertionError(given)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # inspect asks for it first
            [inspect.Parameter(name, kind) for name in names]
        )
        return call

    return type("AsReleased", (), {name: method(names) for name, names in methods.items()})


def facts_of_release(version: str) -> Any:
    release = RELEASES[version]
    return facts_of(class_with(release["factory"]), class_with(release["engine"]))


def test_every_recorded_release_is_of_one_era_or_of_none() -> None:
    assert set(RELEASES) == {*SESSIONS, *CHUNKS, *NEITHER}


@pytest.mark.parametrize("version", SESSIONS)
def test_a_backend_has_sessions_since_0_25(version: str) -> None:
    facts = facts_of_release(version)
    found = era_of(facts)
    assert isinstance(found, tuple)
    assert found[0].name == "sessions"
    assert isinstance(probe_chunks(facts), NotViable)


@pytest.mark.parametrize("version", CHUNKS)
def test_a_backend_has_chunks_alone_from_0_22_to_0_24(version: str) -> None:
    facts = facts_of_release(version)
    found = era_of(facts)
    assert isinstance(found, tuple)
    era, verdict = found
    assert era.name == "chunks"
    assert isinstance(verdict, Viable)
    refused = probe_sessions(facts)
    assert isinstance(refused, NotViable)
    assert "start_weight_update" in refused.reason


@pytest.mark.parametrize("version", NEITHER)
def test_a_backend_without_the_model_is_refused_by_what_is_missing(version: str) -> None:
    found = era_of(facts_of_release(version))
    assert isinstance(found, NotViable)
    assert "chunks: " in found.reason
    assert "__init__(model)" in found.reason


def test_a_vllm_without_weight_transfer_is_refused() -> None:
    found = era_of(no_facts())
    assert isinstance(found, NotViable)
    assert "register_engine" in found.reason


def test_a_session_without_a_configuration_is_no_era() -> None:
    methods = dict(RELEASES["0.32.0"]["engine"])
    methods["__init__"] = ["self", "config", "model"]
    found = era_of(facts_of(class_with(RELEASES["0.32.0"]["factory"]), class_with(methods)))
    assert isinstance(found, NotViable)
    assert "__init__(vllm_config)" in found.reason


class FakeChunkWorker:
    """The calls of a worker of 0.23 around an update, as its `Worker` makes them."""

    def __init__(self) -> None:
        self.active = False
        self.in_checkpoint_form: list[bool] = []

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        if self.active:
            raise RuntimeError("already active")
        self.in_checkpoint_form.append(is_checkpoint_format)
        self.active = True

    def finish_weight_update(self) -> None:
        if not self.active:
            raise RuntimeError("no matching start")
        self.active = False


class FakeReceiver:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.error = error

    def start(self) -> None:
        self._called("start")

    def finish(self) -> None:
        self._called("finish")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.error:
            raise self.error


def test_the_workers_own_start_and_finish_reach_the_receiver() -> None:
    worker, receiver = FakeChunkWorker(), FakeReceiver()
    session = ChunkSession(worker, receiver)
    session.apply()
    session.apply()
    worker.start_weight_update(is_checkpoint_format=True)
    assert worker.active
    worker.finish_weight_update()
    assert not worker.active
    assert receiver.calls == ["start", "finish"]
    assert worker.in_checkpoint_form == [False], "a reload of the worker's own would empty every layer"
    session.undo()
    session.undo()
    worker.start_weight_update()
    assert receiver.calls == ["start", "finish"]
    assert worker.in_checkpoint_form == [False, True]


def test_the_session_of_a_model_that_was_loaded_again_takes_the_place_of_the_first() -> None:
    worker, first, second = FakeChunkWorker(), FakeReceiver(), FakeReceiver()
    ChunkSession(worker, first).apply()
    ChunkSession(worker, second).apply()
    worker.start_weight_update()
    worker.finish_weight_update()
    assert (first.calls, second.calls) == ([], ["start", "finish"])


def test_a_start_that_is_refused_leaves_no_session_open() -> None:
    worker, receiver = FakeChunkWorker(), FakeReceiver(EngineError("Nothing was announced.", "", ""))
    ChunkSession(worker, receiver).apply()
    with pytest.raises(EngineError, match="Nothing was announced"):
        worker.start_weight_update()
    assert not worker.active


def test_a_finish_that_is_refused_lets_the_next_update_start() -> None:
    worker, receiver = FakeChunkWorker(), FakeReceiver()
    ChunkSession(worker, receiver).apply()
    worker.start_weight_update()
    receiver.error = SyncError("The update is not whole.", "", "")
    with pytest.raises(SyncError, match="not whole"):
        worker.finish_weight_update()
    receiver.error = None
    worker.start_weight_update()


def test_calls_that_the_worker_refuses_do_not_reach_the_receiver() -> None:
    worker, receiver = FakeChunkWorker(), FakeReceiver()
    ChunkSession(worker, receiver).apply()
    with pytest.raises(RuntimeError, match="no matching start"):
        worker.finish_weight_update()
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="already active"):
        worker.start_weight_update()
    assert receiver.calls == ["start"]


class FakeMaker:
    """A worker that makes a backend while it loads its model."""

    def __init__(self, config: object) -> None:
        self.vllm_config = SimpleNamespace(weight_transfer_config=config)
        self.model_runner = object()

    def load_model(self, given: object) -> Any:
        return FakeFactory.create_engine(given)


class FakeFactory:
    @classmethod
    def create_engine(cls, config: object) -> Any:
        return making_worker(config)


def test_the_worker_that_makes_a_backend_is_found_by_its_configuration() -> None:
    config = object()
    outer, inner = FakeMaker(config), FakeMaker(config)
    assert inner.load_model(config) is inner
    outer.load_model = inner.load_model  # type: ignore[method-assign]
    assert outer.load_model(config) is inner
    with pytest.raises(EngineError, match="not made by a vLLM worker"):
        inner.load_model(object())
    with pytest.raises(EngineError, match="no caller is one"):
        making_worker(config)


class FakeOldLlm:
    """The calls of an `LLM` before 0.27, of which the update fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        assert set(request) == {"init_info"}

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        assert is_checkpoint_format
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        bucket = request["update_info"]["bucket"]
        self.calls.append(f"update {bucket}")
        if bucket < 0:
            raise SyncError("Out of turn.", "", "")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def weights() -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.ones(2))]


def test_a_version_is_refused_before_anything_is_sent_where_vllm_takes_none() -> None:
    llm = FakeOldLlm()
    sender = WeightSender(OfflineClient(llm), weights)
    with pytest.raises(UsageError, match="takes none before"):
        sender.send("3")
    assert llm.calls == []
    sender.send()
    assert llm.calls == ["start", "update 0", "finish"]
    sender.close()


def test_an_update_that_fails_is_ended_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeOldLlm()
    client = OfflineClient(llm)
    sender = WeightSender(client, weights)
    honest = client.update_weights
    monkeypatch.setattr(client, "update_weights", lambda info: honest({**info, "bucket": -1}))
    with pytest.raises(SyncError, match="Out of turn"):
        sender.send()
    assert llm.calls == ["start", "update -1", "update -1", "finish"]
    sender.close()


def test_a_worker_that_may_sleep_is_asked_whether_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = SimpleNamespace(tag="weights", is_asleep=True, cpu_backup_tensor=None)
    monkeypatch.setattr(sleep_watch, "records_are_kept", lambda: True)
    monkeypatch.setattr(sleep_watch, "_pool", lambda: (asleep,))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=3), model_config=SimpleNamespace(enable_sleep_mode=True)
    )
    worker = SimpleNamespace(vllm_config=config, device=torch.device("cpu"), sleep=print, wake_up=print)
    engine: Any = receiver_of(worker, torch.nn.Module())._engine
    assert engine.released() == ("weights",)
    assert worker.sleep is not print, "the worker's own calls are watched, not those of a stand-in"
