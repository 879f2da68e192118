"""The controller's side against a fake server whose update route does what our loader does."""

from __future__ import annotations

import base64
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.contexts import RolloutTarget
from weightlane.endpoint import TracingEndpoint
from weightlane.errors import EngineDeadError, EngineError, NotServableError, ProtocolError
from weightlane.failures import failure_of
from weightlane.messages import WireTensor, decode, encode
from weightlane.trace.table import PlacementTable, TableKey, TracedSource, Untraced
from weightlane_sglang import loader_channel
from weightlane_sglang.contract import (
    BEGIN_UPDATE_ROUTE,
    END_UPDATE_ROUTE,
    UPDATE_REQUEST,
    UPDATE_ROUTE,
)
from weightlane_sglang.endpoint import SglangEndpoint
from weightlane_sglang.loader_messages import LoaderRequest, Traced
from weightlane_sglang.loader_name import LOADER
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE, write_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TENSORS = (WireTensor("a", (2, 2), "float32"),)


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def endpoint(fake_server: Any) -> Iterator[SglangEndpoint]:
    made = SglangEndpoint(RolloutTarget("sglang", address=fake_server.url), timeout_seconds=10)
    yield made
    made.close()


class FakeLoader:
    """Answers an update as the ranks of a server with our loader would; `ranks` are those that answer."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.ranks = ranks
        self.asked: list[dict[str, Any]] = []

    def __call__(self, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        payloads = fields.pop("serialized_named_tensors")
        self.asked.append(fields)
        assert len(payloads) == 2, "one for each rank, or the server dies"
        for rank in self.ranks:
            ((token, tensor),) = pickle.loads(base64.b64decode(payloads[rank]))  # noqa: S301 - our own
            request = decode(bytes(tensor.tolist()), LoaderRequest, sender="here")
            write_answer(token, rank, self.reply(rank, request))
        return {"success": True, "message": "Success"}

    def reply(self, rank: int, request: Any) -> bytes:
        sources = tuple(
            TracedSource(item.name, item.name, item.shape, item.dtype) for item in request.tensors
        )
        key = TableKey("sglang", "0.5.18", "Model", worker=rank, workers=2, tensor_parallel=2)
        return encode(Traced(PlacementTable(key, "plain", sources, (), ())))


class SleepingLoader(FakeLoader):
    def reply(self, rank: int, request: Any) -> bytes:
        key = TableKey("sglang", "0.5.18", "Model", worker=rank, workers=2, tensor_parallel=2)
        return encode(Traced(PlacementTable(key, "plain", (), (), ()), ("weights",)[:rank]))


class RefusingLoader(FakeLoader):
    def reply(self, rank: int, request: Any) -> bytes:
        return encode(failure_of(ProtocolError("It is of another version."), origin=f"rank {rank}"))


@pytest.fixture
def serve(fake_server: Any, answer: Any) -> Callable[..., FakeLoader]:
    """Gives the fake server a loader, and `changes` to what it tells of itself."""

    def put(loader: FakeLoader, **changes: Any) -> FakeLoader:
        told = {**fake_server.answers["/server_info"].body, "custom_weight_loader": ["other.f", LOADER]}
        fake_server.answers["/server_info"] = answer({**told, **changes})
        fake_server.answers[UPDATE_ROUTE] = answer(loader)
        return loader

    return put


@pytest.fixture
def with_sessions(fake_server: Any, answer: Any) -> None:
    """The fake server takes updates in sessions alone, as 0.5.21 does."""
    document = fake_server.answers["/openapi.json"].body
    for route in (BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE):
        document["paths"][route] = {"post": {}}
        fake_server.answers[route] = answer({"success": True})
    fields = document["components"]["schemas"][UPDATE_REQUEST]["properties"]
    del fields["disable_draft_model"]
    fields["selector"] = {"type": "string"}


def posts(fake_server: Any) -> list[str]:
    return [path for method, path, _ in fake_server.requests if method == "POST"]


def test_each_rank_gives_its_table_in_rank_order(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], run: Path
) -> None:
    loader = serve(FakeLoader())
    tables = endpoint.trace_workers(TENSORS, 10)
    assert isinstance(endpoint, TracingEndpoint)
    assert not isinstance(tables, Untraced)
    assert [table.key.worker for table in tables] == [0, 1]
    assert tables[0].sources == (TracedSource("a", "a", (2, 2), "float32"),)
    assert list(run.iterdir()) == []
    assert loader.asked == [
        {
            "load_format": LOADER,
            "flush_cache": False,
            "abort_all_requests": False,
            "disable_draft_model": True,
            "torch_empty_cache": False,
        }
    ], "nothing that would flush, abort, or set a version"


def test_a_server_without_our_loader_is_not_asked(endpoint: SglangEndpoint, fake_server: Any) -> None:
    untraced = endpoint.trace_workers(TENSORS, 10)
    assert isinstance(untraced, Untraced)
    assert f"without --custom-weight-loader {LOADER}" in untraced.reason
    assert posts(fake_server) == [], "SGLang dies of a load_format that it does not know"


def test_a_server_that_answers_nowhere_is_untraced_and_the_folder_is_named(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_channel, "_GRACE_SECONDS", 0.05)
    serve(FakeLoader(ranks=()))
    untraced = endpoint.trace_workers(TENSORS, 10)
    assert isinstance(untraced, Untraced)
    assert str(run) in untraced.reason
    assert "another host" in untraced.reason


def test_a_server_that_somebody_put_to_sleep_is_not_planned_for(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader]
) -> None:
    serve(SleepingLoader())
    with pytest.raises(NotServableError, match="it has released weights"):
        endpoint.trace_workers(TENSORS, 10)


def test_a_rank_that_does_not_answer_is_an_error(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_channel, "_GRACE_SECONDS", 0.05)
    serve(FakeLoader(ranks=(0,)))
    with pytest.raises(EngineError, match="1 of 2 ranks"):
        endpoint.trace_workers(TENSORS, 10)


def test_a_failure_inside_the_server_is_raised_here(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], run: Path
) -> None:
    serve(RefusingLoader())
    with pytest.raises(ProtocolError, match=r"another version.*rank 0"):
        endpoint.trace_workers(TENSORS, 10)
    assert list(run.iterdir()) == []


def test_a_server_that_dies_of_the_request_is_told_what_it_may_lack(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], fake_server: Any, answer: Any, run: Path
) -> None:
    serve(FakeLoader())
    fake_server.answers[UPDATE_ROUTE] = answer(hang_up=True)
    with pytest.raises(EngineDeadError, match="cannot import weightlane_sglang"):
        endpoint.trace_workers(TENSORS, 10)
    assert list(run.iterdir()) == []


def test_a_run_folder_open_to_others_is_refused_before_the_server_is_asked(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], fake_server: Any, run: Path
) -> None:
    serve(FakeLoader())
    run.mkdir()
    run.chmod(0o777)
    with pytest.raises(EngineError, match="mode 0777"):
        endpoint.trace_workers(TENSORS, 10)
    assert posts(fake_server) == []


@pytest.mark.usefixtures("with_sessions")
def test_where_updates_need_a_session_one_is_open_around_the_request(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], fake_server: Any
) -> None:
    loader = serve(FakeLoader())
    assert not isinstance(endpoint.trace_workers(TENSORS, 10), Untraced)
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE, END_UPDATE_ROUTE]
    assert loader.asked[0]["selector"] == "target"
    assert fake_server.bodies(BEGIN_UPDATE_ROUTE) == [{"selector": "target"}]


@pytest.mark.usefixtures("with_sessions")
def test_the_session_is_ended_when_the_request_fails(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], fake_server: Any, answer: Any
) -> None:
    serve(FakeLoader())
    fake_server.answers[UPDATE_ROUTE] = answer({"success": False, "message": "not now"}, status=400)
    with pytest.raises(EngineError, match="not now"):
        endpoint.trace_workers(TENSORS, 10)
    assert posts(fake_server)[-1] == END_UPDATE_ROUTE


@pytest.mark.usefixtures("with_sessions")
def test_somebody_s_open_session_is_used_and_left_open(
    endpoint: SglangEndpoint, serve: Callable[..., FakeLoader], fake_server: Any, answer: Any
) -> None:
    serve(FakeLoader())
    already = {"success": False, "message": "a weight-update session is already open; call end first"}
    fake_server.answers[BEGIN_UPDATE_ROUTE] = answer(already, status=400)
    assert not isinstance(endpoint.trace_workers(TENSORS, 10), Untraced)
    assert posts(fake_server) == [BEGIN_UPDATE_ROUTE, UPDATE_ROUTE]


@pytest.mark.usefixtures("with_sessions")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization": "fp8"}, "fp8"),
        ({"attention_backend": "intel_amx"}, "AMX"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "experts"),
    ],
)
def test_a_session_that_would_pack_weights_again_is_not_opened_for_a_trace(
    endpoint: SglangEndpoint,
    serve: Callable[..., FakeLoader],
    fake_server: Any,
    changes: dict[str, Any],
    told: str,
) -> None:
    serve(FakeLoader(), **changes)
    untraced = endpoint.trace_workers(TENSORS, 10)
    assert isinstance(untraced, Untraced)
    assert told in untraced.reason
    assert posts(fake_server) == []
