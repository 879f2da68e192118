"""A fake SGLang server over real sockets, and facts as a 0.5.18 server gives them."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.facts import EngineFacts
from weightlane_sglang.contract import (
    CONTINUE_ROUTE,
    FIELDS_USED,
    MEMORY_FIELDS_USED,
    PAUSE_ROUTE,
    RELEASE_ROUTE,
    RESUME_ROUTE,
    ROUTES_USED,
    SESSION_FIELDS_USED,
    SESSION_ROUTES_USED,
    UPDATE_REQUEST,
    UPDATE_ROUTE,
    VERSION_ROUTE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

sys.path.insert(0, str(Path(__file__).parent))  # makes `fake_sgl_engine` importable

FIELDS = {**FIELDS_USED, **MEMORY_FIELDS_USED, "UpdateWeightsFromTensorReqInput": (
    "rid", "http_worker_ipc", "serialized_named_tensors", "load_format", "flush_cache", "abort_all_requests",
    "weight_version", "disable_draft_model", "torch_empty_cache",
)}  # fmt: skip


LANE_ROUTES = (UPDATE_ROUTE, PAUSE_ROUTE, "/flush_cache?timeout=30", VERSION_ROUTE, CONTINUE_ROUTE)
MEMORY_ROUTES = (RELEASE_ROUTE, RESUME_ROUTE)


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
    paths: dict[str, Any] = {route: {"post": {}} for route in (*ROUTES_USED, *MEMORY_ROUTES)}
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


@pytest.fixture(scope="session")
def lane_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's configuration, small enough for a whole lane."""
    from transformers import Qwen3Config

    made = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=16, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(made)  # fmt: skip
    return made


@pytest.fixture
def lane_tensors(lane_folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that it asks for."""
    import torch

    from weightlane.checkpoint import expected_tensors_of_config

    generator = torch.Generator().manual_seed(0)
    return {
        item.name: torch.randn(item.shape, generator=generator)
        for item in expected_tensors_of_config(lane_folder)
    }


class AnswersFrom(dict[str, Any]):
    """Answers every route of a sync; from its `failing`th request on, `route` is answered with `bad`."""

    def __init__(self, answers: dict[str, Any], good: Any) -> None:
        super().__init__(answers, **dict.fromkeys(LANE_ROUTES, good))
        self.route, self.failing, self.bad = "", 0, good

    def fail(self, route: str, number: int, bad: Any) -> None:
        self.route, self.failing, self.bad = route, number, bad

    def get(self, route: str, default: Any = None) -> Any:
        if route == self.route:
            self.failing -= 1
            if self.failing <= 0:
                return self.bad
        return super().get(route, default)


@pytest.fixture
def lane_server(fake_server: FakeSglangServer, lane_folder: Path) -> FakeSglangServer:
    """The fake as a lane meets it: it answers every route of a sync."""
    fake_server.answers = AnswersFrom(fake_server.answers, Answer({"success": True}))
    fake_server.answers["/model_info"] = Answer(
        {"model_path": str(lane_folder), "weight_version": "default", "architectures": ["Qwen3ForCausalLM"]}
    )
    return fake_server


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
            "routes": (*ROUTES_USED, *MEMORY_ROUTES),
            "parallel": ParallelSizes(tensor=2),
        }
        return EngineFacts(**{**known, **changes})

    return make


@pytest.fixture
def session_facts(facts_of: Callable[..., EngineFacts]) -> EngineFacts:
    """Facts of a 0.5.23 server."""
    update = tuple(name for name in FIELDS[UPDATE_REQUEST] if name != "disable_draft_model")
    fields = {**FIELDS, **SESSION_FIELDS_USED, UPDATE_REQUEST: (*update, "selector")}
    return facts_of(version="0.5.23", routes=(*SESSION_ROUTES_USED, *MEMORY_ROUTES), request_fields=fields)
