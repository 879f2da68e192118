"""`launch-args` tells when another engine listens where it would have this one listen."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from weightlane.cli.addresses import is_taken, second_replica_note
from weightlane.front.socket_folder import RUNTIME_VARIABLE, socket_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Run

WORDS = ("launch-args", "reference", "--device", "cpu")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with socket_folder() as private:
        monkeypatch.setenv(RUNTIME_VARIABLE, str(private))
        (private / "weightlane").mkdir()
        yield private / "weightlane"


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.bind(str(folder / "reference.sock"))
        one.listen(1)
        yield one


def test_an_address_in_use_is_told_and_the_one_beside_it_can_be_taken(
    run: Callable[..., Run], folder: Path, listener: socket.socket
) -> None:
    done = run(*WORDS)
    assert done.status == 0
    assert f"note: Something on this machine listens on unix:{folder}/reference.sock already" in done.err
    other = f"unix:{folder}/reference-2.sock"
    assert f"--address {other}." in done.err
    assert "already" not in run(*WORDS, "--address", other).err


def test_a_socket_that_nobody_listens_on_is_no_engine(
    run: Callable[..., Run], folder: Path, listener: socket.socket
) -> None:
    listener.close()
    assert (folder / "reference.sock").is_socket()
    err = run(*WORDS).err
    assert "already" not in err
    assert "A second replica on this host needs an address of its own" in err


def test_an_address_that_was_given_is_looked_at_too(run: Callable[..., Run], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for scheme, found in (
            ("tcp:127.0.0.1", True),
            ("http://127.0.0.1", True),
            ("http://localhost", True),
        ):
            assert is_taken(f"{scheme}:{port}") is found
        assert f"tcp:127.0.0.1:{port} already" in run(*WORDS, "--address", f"tcp:127.0.0.1:{port}").err
    assert not is_taken(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    ["", "unix:relative", "http://", "http://127.0.0.1:99999", "http://[", "tcp:example.org:1", "?"],
)
def test_what_is_no_address_of_this_machine_is_not_called_taken(address: str) -> None:
    assert not is_taken(address)


def test_other_machines_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"it asked {arguments}")

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not is_taken("http://engine.invalid:30000")
    with pytest.raises(AssertionError):
        is_taken("http://127.0.0.1:30000")


@pytest.mark.parametrize(
    ("address", "other"),
    [
        ("unix:/run/a.sock", "such as --address unix:/run/a-2.sock"),
        ("unix:/run/a", "such as --address unix:/run/a-2.sock"),
        ("tcp:127.0.0.1:7000", "such as --address tcp:127.0.0.1:7001"),
        ("http://127.0.0.1:65535", "give --address"),
        ("acme", "give --address"),
    ],
)
def test_the_address_beside_one(address: str, other: str) -> None:
    assert second_replica_note(address).endswith(f"{other}.")
