"""The trainer's end of a group of torch.distributed that SGLang's schedulers join: rank 0 broadcasts.

The server makes its end by torch's own helper for named groups, whose keys in the store begin with the name
of the group, twice, and the kind of device. A backend is made here under the same keys, and nothing is
registered with the default group, which may be the user's mesh.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError, SyncTimeoutError
from weightlane.listening_store import serve_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store, Work

    from weightlane.program import AnnouncedGroup

_POLL_SECONDS = 0.0005
_LONGEST_POLL_SECONDS = 0.02
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class UpdateGroup:
    """One group, from when all have joined.

    Nothing here waits inside torch: gloo cannot be interrupted there. An operation that is given up ends by
    itself, when the server lets go of the group or at the latest after `seconds`.

    Args:
        store: served by this process.
        name: of the group, as the server was told.
        group: backend and number of ranks.
        seconds: after which torch ends one broadcast by itself.
    """

    def __init__(self, store: Store, name: str, group: AnnouncedGroup, seconds: float) -> None:
        self._store = store
        self._device = _DEVICES[group.backend]
        self._backend = _backend(_keys(store, name, self._device), group, seconds)
        self._running: list[Any] = []

    def broadcast(self, tensors: Sequence[Tensor], check: Callable[[], None], seconds: float) -> None:
        """Sends each tensor to every rank, in this order; `check` is asked meanwhile and raises to give up.

        Raises:
            EngineError: the connection to a scheduler broke.
            SyncTimeoutError: not all arrived within `seconds`.
        """
        from torch._C._distributed_c10d import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        ready = [tensor.to(self._device).contiguous() for tensor in tensors]
        works: list[Work] = []
        self._running = [self._backend, ready, works]  # alive for as long as any of it may run
        # Bounded by the loop below: queued here, waited for there.
        works += [self._backend.broadcast([tensor], options) for tensor in ready]
        deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
        for work in works:
            while not work.is_completed():
                check()
                if time.monotonic() > deadline:
                    raise SyncTimeoutError(
                        f"A bucket was not taken by SGLang's schedulers within {seconds:.0f} s.",
                        "They had been told of it, and did not take part in its broadcast.",
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)
            try:
                work.wait()  # bounded by the loop above: it has ended
            except RuntimeError as error:
                raise EngineError(f"A broadcast to SGLang's schedulers broke: {error}.") from error
        self._running = []

    def close(self) -> None:
        """Lets go. What still runs is waited for by a thread of its own, which keeps its memory alive."""
        running, self._running = self._running, []
        if running:
            threading.Thread(target=_wait_for, args=(running,), daemon=True).start()
        self._backend = None


def serving_address(host: str) -> str:
    """The address of this host under which `host` can reach it; loopback where it is on loopback."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent
        return str(probe.getsockname()[0])


def serve_group_store(host: str, seconds: float) -> tuple[Store, int]:
    """(store, port): a store that listens on `host` alone, for the group to find itself."""
    listening = socket.socket(_family(host))
    listening.bind((host, 0))
    listening.listen(128)
    port = int(listening.getsockname()[1])
    return serve_store(listening.detach(), host=host, port=port, seconds=seconds), port


def _family(host: str) -> socket.AddressFamily:
    found = {item[0] for item in socket.getaddrinfo(host, None)}
    return (
        socket.AF_INET if socket.AF_INET in found else socket.AF_INET6
    )  # older servers take the first alone


def _keys(store: Store, name: str, device: str) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def _backend(store: Store, group: AnnouncedGroup, seconds: float) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=seconds)
    ranks = group.workers + 1
    if group.backend == "gloo":
        return dist.ProcessGroupGloo(store, 0, ranks, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, 0, ranks, options)


def _wait_for(running: list[Any]) -> None:
    _, _, works = running
    for work in works:
        try:
            work.wait()  # bounded by the seconds that the backend was made with
        except RuntimeError:
            continue  # told already, by whoever gave it up
