"""A live front that strangers crowd, stall, lie to and leave serves others and gives back what they took."""

from __future__ import annotations

import os
import socket
import struct
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from damage import damaged

from weightlane import errors, messages
from weightlane.errors import EngineError, WeightlaneError
from weightlane.front.client import FrontEndpoint
from weightlane.front.process import FrontProcess, start_front_process
from weightlane.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKE_FRONT = Path(__file__).with_name("fake_front.py")
HALF_FRAME = struct.pack("!i", 1000) + b"only the beginning"
CLAIMS_A_GIB = struct.pack("!i", (1 << 30) - 1) + b"x"
TYPED = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, WeightlaneError)
}


def open_files(front: FrontProcess) -> int:
    return len(list(Path(f"/proc/{front.process.pid}/fd").iterdir()))


def threads(front: FrontProcess) -> int:
    return len(list(Path(f"/proc/{front.process.pid}/task").iterdir()))


def virtual_mib(front: FrontProcess) -> float:
    lines = Path(f"/proc/{front.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmPeak")).split()[1]) / 1024


class Crowd:
    """Many bare connections; closes them all at the end."""

    def __init__(self, front: FrontProcess) -> None:
        self._path = front.address.removeprefix("unix:")
        self.sockets: list[socket.socket] = []

    def join(self, count: int, says: bytes) -> None:
        for _ in range(count):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(10.0)
            sock.connect(self._path)
            if says:
                sock.sendall(says)
            self.sockets.append(sock)

    def leave(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()


@pytest.fixture
def crowd(front: FrontProcess) -> Iterator[Crowd]:
    crowd = Crowd(front)
    yield crowd
    crowd.leave()


@pytest.mark.parametrize("says", [b"", b"\x00", HALF_FRAME], ids=["nothing", "one byte", "half a frame"])
def test_more_stalled_strangers_than_there_is_room_for_keep_nobody_out(
    front: FrontProcess, endpoint: FrontEndpoint, crowd: Crowd, says: bytes
) -> None:
    endpoint.facts()
    before = open_files(front), threads(front)
    for _ in range(3):
        crowd.join(70, says)
        assert endpoint.facts().engine == "fake"
    assert open_files(front) <= before[0] + 135
    crowd.leave()
    assert wait_until(lambda: (open_files(front), threads(front)) <= before, seconds=20.0)
    assert endpoint.facts().engine == "fake"


def test_frames_that_claim_a_gibibyte_each_take_nothing(
    front: FrontProcess, endpoint: FrontEndpoint, crowd: Crowd
) -> None:
    endpoint.facts()
    before = virtual_mib(front)
    crowd.join(40, CLAIMS_A_GIB)
    assert endpoint.facts().engine == "fake"
    # A thread's stack is reserved at 8 MiB; its frame would have been 1024 more.
    assert virtual_mib(front) - before < 40 * 200


def test_callers_that_leave_before_their_answer_harm_nobody(
    front: FrontProcess, endpoint: FrontEndpoint, crowd: Crowd
) -> None:
    endpoint.facts()
    before = open_files(front)
    request = messages.encode(messages.Generate(((1, 2, 3),) * 500, 3))
    crowd.join(30, struct.pack("!i", len(request)) + request)
    crowd.leave()
    assert wait_until(lambda: open_files(front) <= before, seconds=20.0)
    assert len(endpoint.generate([[1, 2]], max_tokens=1)) == 1


REQUESTS: list[Any] = [
    messages.GetFacts(),
    messages.CallWorkers(messages.encode(messages.Publish("lane", 1, 2)), 5.0),
    messages.CallWorkers(messages.encode(messages.BeginInline("lane", "d", 1, 2, {0: "i"})), 5.0),
    messages.CallEngine("pause"),
    messages.Generate(((1, 2), ()), 4),
]


def test_damaged_requests_are_answered_in_typed_errors_and_fence_nothing(
    stranger: socket.socket, endpoint: FrontEndpoint
) -> None:
    random = Random(0)
    with Connection(stranger.detach()) as connection:
        for _ in range(300):
            request = random.choice(REQUESTS)
            if isinstance(request, messages.CallWorkers):
                agents = messages.decode(request.message, messages.AgentRequest, sender="test")
                data = messages.encode(messages.CallWorkers(damaged(agents, random), 5.0))
                if is_whole(data):
                    continue  # a sync that really begins holds generation back, as it should
            else:
                data = damaged(request, random)
            connection.send_bytes(data)
            assert connection.poll(10.0)
            reply: messages.FrontReply = messages.decode(
                connection.recv_bytes(), messages.FrontReply, sender="test"
            )
            if isinstance(reply, messages.Failure):
                assert reply.error_type in TYPED, reply.traceback
    assert len(endpoint.generate([[1, 2]], max_tokens=1)) == 1


def is_whole(data: bytes) -> bool:
    request: Any = messages.decode(data, messages.FrontRequest, sender="test")
    try:
        messages.decode(request.message, messages.AgentRequest, sender="test")
    except WeightlaneError:
        return False
    return True


def test_what_only_looks_like_a_sync_does_not_hold_generation_back(endpoint: FrontEndpoint) -> None:
    import msgspec

    for kind in ("receive", "begin-inline", "publish", "finish-inline", "cancel"):
        with pytest.raises(errors.ProtocolError, match="could not be read"):
            endpoint.call_workers(msgspec.msgpack.encode({"type": kind, "sync": 1}), 5.0)
    assert len(endpoint.generate([[1, 2]], max_tokens=1)) == 1


def test_an_answer_that_cannot_be_encoded_is_told(endpoint: FrontEndpoint) -> None:
    from weightlane.program import EngineCall

    with pytest.raises(EngineError, match="UnicodeEncodeError"):
        endpoint.call(EngineCall("not text"))
    assert endpoint.facts().engine == "fake"


def test_strangers_on_a_tcp_port_get_no_further_than_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("WEIGHTLANE_FRONT_KEY", "secret")
    address = f"tcp:127.0.0.1:{port}"
    argv = [sys.executable, str(FAKE_FRONT), address]
    with start_front_process(argv, address, log=tmp_path / "log", ready_timeout_seconds=20.0) as front:
        random = Random(1)
        request = messages.encode(messages.Shutdown())
        for garbage in [
            b"",
            struct.pack("!i", len(request)) + request,
            struct.pack("!i", 1 << 30),
            os.urandom(300),
        ]:
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", port), timeout=10.0) as sock:
                    sock.sendall(garbage + random.randbytes(random.randint(0, 9)))
        stalled = [socket.create_connection(("127.0.0.1", port), timeout=10.0) for _ in range(140)]
        try:
            assert FrontEndpoint(address, 10.0).facts().engine == "fake"
            with pytest.raises(EngineError, match="same key"):
                FrontEndpoint(address, 10.0, authkey=b"another").facts()
        finally:
            for sock in stalled:
                sock.close()
        assert "Traceback" not in front.last_log_lines(1000)
