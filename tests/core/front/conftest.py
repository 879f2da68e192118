from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.front.client import FrontEndpoint
from weightlane.front.process import FrontProcess, start_front_process

if TYPE_CHECKING:
    from collections.abc import Iterator

# Under importlib mode test folders are not on the path; `damage` is in the one of messages.
sys.path.insert(0, str(Path(__file__).parents[1] / "messages"))

FAKE_FRONT = Path(__file__).with_name("fake_front.py")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s/front"


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """One front for all tests that leave it alive; bad input of one must not harm the next."""
    folder = tmp_path_factory.mktemp("front")
    address = f"unix:{folder}/s/front"
    argv = [sys.executable, str(FAKE_FRONT), address]
    with start_front_process(argv, address, log=folder / "log", ready_timeout_seconds=20.0) as process:
        yield process


@pytest.fixture
def own_front(address: str, tmp_path: Path) -> Iterator[FrontProcess]:
    argv = [sys.executable, str(FAKE_FRONT), address]
    with start_front_process(argv, address, log=tmp_path / "log", ready_timeout_seconds=20.0) as process:
        yield process


@pytest.fixture
def endpoint(front: FrontProcess) -> Iterator[FrontEndpoint]:
    endpoint = FrontEndpoint(front.address, 10.0)
    yield endpoint
    endpoint.close()


@pytest.fixture
def stranger(front: FrontProcess) -> Iterator[socket.socket]:
    """A bare socket on the front: whatever it sends, weightlane did not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10.0)
        sock.connect(front.address.removeprefix("unix:"))
        sock.settimeout(None)
        yield sock
