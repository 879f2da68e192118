"""The control channel's store takes the socket that it is given, with either of torch's servers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from weightlane.listening_store import serve_store


def serve() -> tuple[str, int]:
    """What a client reads, and how many descriptors the server's start left beside its own socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listen_on = listener.detach()
    inode = os.fstat(listen_on).st_ino
    store = serve_store(listen_on, host="127.0.0.1", port=port, seconds=10)
    store.set("said", "heard")
    client = c10d.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return client.get("said").decode(), held_of(inode)


def held_of(inode: int) -> int:
    held = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            held += os.fstat(int(entry.name)).st_ino == inode
        except OSError:
            continue
    return held


def test_a_client_reads_what_the_server_was_told() -> None:
    assert serve() == ("heard", 1)


def test_a_torch_that_takes_a_socket_with_its_older_server_alone_is_asked_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch 2.4 and 2.5 answer."""
    asked: list[bool] = []
    real = c10d.TCPStore

    def as_in_2_5(*args: Any, use_libuv: bool = True, **kwargs: Any) -> Any:
        if "master_listen_fd" in kwargs:
            asked.append(use_libuv)
            if use_libuv:
                raise NotImplementedError("The libuv TCPStore backend does not support a listen fd.")
        return real(*args, use_libuv=use_libuv, **kwargs)

    monkeypatch.setattr(c10d, "TCPStore", as_in_2_5)
    assert serve() == ("heard", 1)
    assert asked == [True, False]


def test_what_torch_refuses_otherwise_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("in use")

    monkeypatch.setattr(c10d, "TCPStore", refuses)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(RuntimeError, match="in use"):
        serve_store(os.dup(listener.fileno()), host="127.0.0.1", port=1, seconds=1)
