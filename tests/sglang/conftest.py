"""A fake SGLang server over real sockets, and facts as a 0.5.18 server gives them."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.facts import EngineFacts
from weightlane_sglang.contract import (
    FIELDS_USED,
    ROUTES_USED,
    SESSION_FIELDS_USED,
    SESSION_ROUTES_USED,
    UPDATE_REQUEST,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIELDS = {**FIELDS_USED, "UpdateWeightsFromTensorReqInput": (
    "rid", "http_worker_ipc", "serialized_named_tensors", "load_format", "flush_cache", "abort_all_requests",
    "weight_version", "disable_draft_model", "torch_empty_cache",
)}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What the fake answers: a status and a body; `hang_up` breaks the connection instead.

    A body that is a function is called with what was sent, and gives the body.
    """

    body: Any = None
    status: int = 200
    hang_up: bool = False
    after_seconds: float = 0.0


@dataclass
class FakeSglangServer:
    """Answers every route with what `answers` holds for it, and keeps what it was sent."""

    url: str
    answers: dict[str, Answer]
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def bodies(self, route: str) -> list[Any]:
        return [json.loads(body) for _, path, body in self.requests if path == route]


def openapi_document() -> dict[str, Any]:
    paths: dict[str, Any] = {route: {"post": {}} for route in ROUTES_USED}
    paths["/flush_cache"] = {"post": {"parameters": [{"name": "timeout", "in": "query"}]}}
    schemas = {
        name: {"properties": {each: {"type": "string"} for each in fields}}
        for name, fields in FIELDS.items()
        if not name.startswith("/")
    }
    return {"paths": paths, "components": {"schemas": schemas}}


def server_info() -> dict[str, Any]:
    return {
        "version": "0.5.18",
        "tp_size": 2,
        "pp_size": 1,
        "dp_size": 1,
        "device": "cpu",
        "dtype": "float32",
        "quantization": None,
        "random_seed": 7,
        "enable_lora": None,
        "enable_dp_attention": False,
        "weight_cache_mode": "off",
        "startup_time": {"load_weight": 0.06648675099995671, "cuda_graph": {"prefill": 0.0}},
        "an_argument_of_a_later_version": {"x": 1},
    }


@pytest.fixture
def fake_server() -> Iterator[FakeSglangServer]:
    answers = {
        "/openapi.json": Answer(openapi_document()),
        "/server_info": Answer(server_info()),
        "/model_info": Answer({"model_path": "/nowhere", "weight_version": "default", "architectures": None}),
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    fake = FakeSglangServer(f"http://127.0.0.1:{server.server_address[1]}", answers)
    server.fake = fake  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.released.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        fake: FakeSglangServer = self.server.fake  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        fake.requests.append((self.command, self.path, body))
        answer = fake.answers.get(self.path, Answer({"detail": "Not Found"}, status=404))
        if answer.after_seconds:
            fake.released.wait(answer.after_seconds)
        if answer.hang_up:
            self.close_connection = True
            return
        told = answer.body(body) if callable(answer.body) else answer.body
        data = told if isinstance(told, bytes) else json.dumps(told).encode()
        with contextlib.suppress(ConnectionError):  # a client that gave up is part of a test
            self._send(answer.status, data)

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def answer() -> type[Answer]:
    return Answer


@pytest.fixture
def facts_of() -> Callable[..., EngineFacts]:
    """Facts of a 0.5.18 server at TP 2, with any of them replaced."""

    def make(**changes: Any) -> EngineFacts:
        from weightlane.facts import ParallelSizes

        known: dict[str, Any] = {
            "engine": "sglang",
            "version": "0.5.18",
            "source": "server",
            "request_fields": dict(FIELDS),
            "routes": tuple(ROUTES_USED),
            "parallel": ParallelSizes(tensor=2),
        }
        return EngineFacts(**{**known, **changes})

    return make


@pytest.fixture
def session_facts(facts_of: Callable[..., EngineFacts]) -> EngineFacts:
    """Facts of a 0.5.23 server."""
    update = tuple(name for name in FIELDS[UPDATE_REQUEST] if name != "disable_draft_model")
    fields = {**FIELDS, **SESSION_FIELDS_USED, UPDATE_REQUEST: (*update, "selector")}
    return facts_of(version="0.5.23", routes=tuple(SESSION_ROUTES_USED), request_fields=fields)
