from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.errors import EngineError
from weightlane.front.address import KEY_VARIABLE, parse_address
from weightlane.front.client import FrontEndpoint
from weightlane.front.process import FrontProcess, start_front_process
from weightlane.front.server import serve_front

FAKE_FRONT = Path(__file__).with_name("fake_front.py")


class FakeIdleEngine:
    """Never reached: the address is refused first."""

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("unix:relative/path", "must be absolute"),
        ("unix:/" + "x" * 120, "107 bytes"),
        ("tcp:10.0.0.1:80", "not loopback"),
        ("tcp:127.0.0.1:99999", "not a port"),
        ("tcp:127.0.0.1", "not a port"),
        ("http://127.0.0.1:1", "starts with 'http'"),
        ("tcp:127.example.org:80", "not loopback"),  # a name that begins like an address leads anywhere
        ("tcp:127.0.0.1.nip.io:80", "not loopback"),
        ("tcp:127.0.0.1:\N{SUPERSCRIPT TWO}", "not a port"),
        ("tcp:127.0.0.1:" + "9" * 5000, "not a port"),
        ("unix:/a\x00b", "zero byte"),
        ("unix:/\ud800", "encodable"),
    ],
)
def test_a_bad_address_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        parse_address(text)


@settings(max_examples=200)
@given(st.one_of(st.text(), st.text().map("unix:/".__add__), st.text().map("tcp:127.0.0.1:".__add__)))
def test_any_text_is_an_address_or_an_engine_error(text: str) -> None:
    try:
        address = parse_address(text)
    except EngineError:
        return
    assert address.path.startswith("/") or address.host


def test_socket_and_folder_belong_to_their_owner_alone(front: FrontProcess) -> None:
    path = Path(front.address.removeprefix("unix:"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(front.log.stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(EngineError, match=r"mode is 0755.*chmod 700"):
        serve_front(FakeIdleEngine(), f"unix:{folder}/front")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_removed_for_one(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "model.safetensors"
    if kind == "file":
        path.write_text("worth keeping")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(EngineError, match="Something else than a socket has that path"):
        serve_front(FakeIdleEngine(), f"unix:{path}")  # type: ignore[arg-type]
    assert path.is_symlink() or path.exists()
    if kind == "file":
        assert path.read_text() == "worth keeping"


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not tell who listens")
def test_weights_go_to_no_front_of_another_user(front: FrontProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.getuid()
    for owner, me, allowed in ((mine, mine, True), (1001, 1002, False), (0, 1002, True), (1001, 0, True)):
        told = struct.pack("iii", 1, owner, owner)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda me=me: me)
            patch.setattr(socket.socket, "getsockopt", lambda *_, told=told: told)
            if allowed:
                assert FrontEndpoint(front.address, 5.0).facts().engine == "fake"
                continue
            with pytest.raises(EngineError, match=r"is another user's.*User 1001 listens there"):
                FrontEndpoint(front.address, 5.0).facts()


def test_a_live_front_is_not_displaced_and_a_dead_ones_socket_is(
    own_front: FrontProcess, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="Another front already listens"):
        serve_front(FakeIdleEngine(), own_front.address)  # type: ignore[arg-type]
    assert FrontEndpoint(own_front.address, 5.0).facts().engine == "fake"
    own_front.process.kill()
    own_front.process.wait(5.0)
    assert Path(own_front.address.removeprefix("unix:")).exists()
    argv = [sys.executable, str(FAKE_FRONT), own_front.address]
    with start_front_process(argv, own_front.address, log=tmp_path / "log2", ready_timeout_seconds=20.0):
        assert FrontEndpoint(own_front.address, 5.0).facts().engine == "fake"


def test_tcp_needs_a_key_and_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp:127.0.0.1:{port}"
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(EngineError, match=f"needs a key.*{KEY_VARIABLE}"):
        FrontEndpoint(address, 5.0)
    with pytest.raises(EngineError, match="needs a key"):
        serve_front(FakeIdleEngine(), address)  # type: ignore[arg-type]
    monkeypatch.setenv(KEY_VARIABLE, "the secret")
    argv = [sys.executable, str(FAKE_FRONT), address]
    with start_front_process(argv, address, log=tmp_path / "log", ready_timeout_seconds=20.0):
        with socket.create_connection(("127.0.0.1", port)):  # says nothing in the challenge
            started = time.monotonic()
            assert FrontEndpoint(address, 5.0).facts().engine == "fake"
            assert time.monotonic() - started < 2.0
        with pytest.raises(EngineError, match="do not hold the same key"):
            FrontEndpoint(address, 5.0, authkey=b"a guess").facts()
        assert FrontEndpoint(address, 5.0, authkey=b"the secret").facts().engine == "fake"


def test_an_end_of_the_block_ends_the_engine_and_all_its_children(tmp_path: Path, address: str) -> None:
    from weightlane.program import EngineCall

    argv = [sys.executable, str(FAKE_FRONT), address]
    with start_front_process(argv, address, log=tmp_path / "log", ready_timeout_seconds=20.0) as front:
        child = int(FrontEndpoint(address, 5.0).call(EngineCall("child")))
        os.kill(child, 0)
    assert "engine shut down" in front.last_log_lines()
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert threading.active_count() < 50


def test_an_engine_that_ends_while_loading_shows_the_end_of_its_log(tmp_path: Path, address: str) -> None:
    from weightlane.errors import EngineDeadError, SyncTimeoutError

    argv = [sys.executable, str(FAKE_FRONT), address]
    with (
        pytest.raises(
            EngineDeadError, match=r"ended with status 1[\s\S]*loading weights\nthe model does not fit"
        ),
        start_front_process([*argv, "fail"], address, log=tmp_path / "log", ready_timeout_seconds=20.0),
    ):
        pytest.fail("entered the block of an engine that never answered")
    with (
        pytest.raises(SyncTimeoutError, match=r"did not answer within 6 s[\s\S]*still loading"),
        start_front_process([*argv, "hang"], address, log=tmp_path / "log", ready_timeout_seconds=6.0),
    ):
        pytest.fail("entered the block of an engine that never answered")
    with (
        pytest.raises(EngineDeadError, match=r"could not be started: .*no-such-program"),
        start_front_process(["/no-such-program"], address, log=tmp_path / "log", ready_timeout_seconds=1.0),
    ):
        pytest.fail("entered the block of an engine that was never started")
