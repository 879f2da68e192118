"""Starting and ending a server: a fake interpreter stands in for SGLang's environment."""

from __future__ import annotations

import ast
import os
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import pytest

from weightlane.contexts import LaunchContext
from weightlane.errors import EngineDeadError, EngineError, PlanError
from weightlane.facts import EngineFacts
from weightlane.types import Mode
from weightlane_sglang.launch import (
    ServerSettings,
    _free_port,
    launched_server,
    plan_launch,
    server_arguments,
    server_environment,
)
from weightlane_sglang.plugin import weightlane_register_backends

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAKE_SERVER = """
import http.server, os, subprocess, sys
assert "PYTHONPATH" not in os.environ
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers()
        self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
FAILING_SERVER = "import sys; print('no kernel image for this machine'); sys.exit(3)"
HANGING_SERVER = "import time; print('loading weights', flush=True); time.sleep(600)"


@pytest.fixture
def fake_python(tmp_path: Path) -> Callable[[str], Path]:
    def make(source: str) -> Path:
        script = tmp_path / "server.py"
        script.write_text(source)
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o700)
        return python

    return make


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_and_its_children_end_with_the_block(
    fake_python: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    log = tmp_path / "server.log"
    with launched_server(
        ServerSettings(fake_python(FAKE_SERVER), tmp_path, "cpu"), log=log, ready_within_seconds=30
    ) as server:
        child = int(log.read_text().split("child ")[1].split()[0])
        assert alive(server.process_id)
        assert alive(child)
        assert server.url.startswith("http://127.0.0.1:")
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
    assert not alive(server.process_id)


def test_a_server_listens_below_the_ports_of_connections_where_10000_above_is_a_port_too(
    fake_python: Any, tmp_path: Path
) -> None:
    settings = ServerSettings(fake_python(FAKE_SERVER), tmp_path, "cpu")
    with launched_server(settings, log=tmp_path / "log", ready_within_seconds=30) as server:
        port = int(server.url.rpartition(":")[2])
    assert 20000 <= port < 32768


def test_a_port_that_somebody_listens_on_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
        monkeypatch.setattr("weightlane_sglang.launch._PORTS", range(port, port + 1))
        with pytest.raises(EngineError, match=f"No port from {port} to {port} is free"):
            _free_port()
    assert _free_port() == port


def test_a_server_that_fails_to_start_shows_the_end_of_its_log(fake_python: Any, tmp_path: Path) -> None:
    settings = ServerSettings(fake_python(FAILING_SERVER), tmp_path, "cpu")
    with (
        pytest.raises(EngineDeadError, match=r"status 3(.|\n)*no kernel image"),
        launched_server(settings, log=tmp_path / "log", ready_within_seconds=30),
    ):
        pytest.fail("it is not running")


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("gpu", False)])
def test_a_start_for_cpu_that_fails_tells_what_cpu_needs(
    fake_python: Any, tmp_path: Path, device: Literal["cpu", "gpu"], told: bool
) -> None:
    settings = ServerSettings(fake_python(FAILING_SERVER), tmp_path, device)
    with pytest.raises(EngineDeadError) as caught, launched_server(settings, log=tmp_path / "log"):
        pytest.fail("it is not running")
    assert ("hold no kernels" in str(caught.value)) is told


def test_the_device_is_never_left_to_a_default(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="device"):
        ServerSettings(python=tmp_path, model=tmp_path)  # type: ignore[call-arg]


def test_a_server_that_is_never_ready_is_given_up_in_time(fake_python: Any, tmp_path: Path) -> None:
    settings = ServerSettings(fake_python(HANGING_SERVER), tmp_path, "cpu")
    started = time.monotonic()
    with (
        pytest.raises(EngineError, match=r"not ready within 2 s(.|\n)*loading weights"),
        launched_server(settings, log=tmp_path / "log", ready_within_seconds=2),
    ):
        pytest.fail("it is not running")
    assert time.monotonic() - started < 20


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path / "no/python", tmp_path, "cpu")
    with pytest.raises(EngineError, match="no/python"), launched_server(settings):
        pytest.fail("it is not running")


def test_the_launch_plan_is_what_is_started(fake_python: Any, tmp_path: Path) -> None:
    descriptor, *_ = weightlane_register_backends()
    facts = EngineFacts(engine="sglang", version="0.5.18", source="installed", device="cpu")
    source = FAKE_SERVER.replace("import http", "import sys; print(sys.argv[1:], flush=True)\nimport http", 1)
    log = tmp_path / "log"
    settings = ServerSettings(fake_python(source), tmp_path, "cpu", tensor_parallel=2)
    with launched_server(settings, log=log, ready_within_seconds=30) as server:
        started = ast.literal_eval(log.read_text().splitlines()[0])
    context = LaunchContext(
        descriptor, facts, Mode.FULL, str(tmp_path.resolve()), tensor_parallel=2, address=server.url
    )
    plan = plan_launch(context)
    assert list(plan.arguments) == started
    assert plan.environment == server_environment(tensor_parallel=2, device="cpu")
    assert plan.address == server.url


@pytest.mark.parametrize(
    "address", ["unix:/x", "https://here:1", "http://here", "http://here:port", "http://here:1/v1"]
)
def test_the_launch_plan_refuses_an_address_where_no_server_can_listen(address: str) -> None:
    descriptor, *_ = weightlane_register_backends()
    facts = EngineFacts(engine="sglang", version="0.5.18", source="installed")
    with pytest.raises(PlanError, match=r"http://HOST:PORT"):
        plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/m", address=address))
    assert plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/m")).address == "http://127.0.0.1:30000"


def test_cpu_ranks_get_cores_of_their_own() -> None:
    environment = server_environment(tensor_parallel=2, device="cpu")
    shares = environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(shares) == 2
    assert len(set(shares)) == (2 if (os.cpu_count() or 1) > 1 else 1)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in server_environment(tensor_parallel=1, device="cpu")


def test_a_gpu_server_keeps_sglang_s_own_defaults() -> None:
    assert server_arguments("/m", tensor_parallel=4, device="gpu") == ("--model-path", "/m", "--tp", "4")
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(tensor_parallel=4, device="gpu")


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_server_keeps_nothing_of_encoders_since_no_flush_empties_that(device: Any) -> None:
    assert server_environment(tensor_parallel=1, device=device)["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


@pytest.mark.parametrize("held", [True, False])
def test_our_code_is_let_in_where_the_environment_holds_it(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLANE_RUN_FOLDER", "/run/ours")
    descriptor, *_ = weightlane_register_backends()
    seen = {"weightlane_sglang.weight_loader:answer": held}
    facts = EngineFacts(engine="sglang", version="0.5.18", source="installed", attributes=seen)
    plan = plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/m"))
    option = ("--custom-weight-loader", "weightlane_sglang.weight_loader.answer")
    assert (plan.arguments[-2:] == option) is held
    assert plan.requires == (("weightlane-sglang",) if held else ())
    assert plan.environment.get("WEIGHTLANE_RUN_FOLDER") == ("/run/ours" if held else None)
    assert any("untraced" in note for note in plan.notes) is not held
