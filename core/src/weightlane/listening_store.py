"""A TCPStore whose server listens on a socket that is given; by itself it would listen on every interface."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def serve_store(listen_on: int, *, host: str, port: int, seconds: float) -> TCPStore:
    """The store's server, in this process.

    torch 2.4 and 2.5 take a socket with the older of their two servers alone, which they say when they are
    asked; newer ones with either.

    Args:
        listen_on: descriptor of the listening socket; the store owns it from here on.
        host: by which this process reaches it.
        port: that it listens on.
        seconds: bound of each later wait.

    Raises:
        RuntimeError: torch cannot serve there.
    """
    spare = os.dup(listen_on)
    try:
        store = _store(listen_on, host, port, seconds, use_libuv=True)
    except NotImplementedError:
        os.close(listen_on)  # it was not taken
        return _store(spare, host, port, seconds, use_libuv=False)
    except BaseException:
        os.close(spare)
        raise
    os.close(spare)
    return store


def _store(listen_on: int, host: str, port: int, seconds: float, *, use_libuv: bool) -> TCPStore:
    # Where it is defined: torch.distributed re-exports it without saying so to type checkers.
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listen_on,
        use_libuv=use_libuv,
    )
