"""Updates that SGLang is told of first and then takes from a broadcast: announced, fed, awaited.

The announcement is a request that the server answers once it has loaded the bucket, so that it runs in a
thread beside the broadcast. One that is refused never joins: it is looked at while the broadcast runs, which
is then given up, and the group with it.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineError
from weightlane_sglang.beside import Beside
from weightlane_sglang.contract import DESTROY_GROUP_ROUTE, INIT_GROUP_ROUTE
from weightlane_sglang.update_group import UpdateGroup, serve_group_store, serving_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.program import AnnouncedGroup, RequestMove
    from weightlane_sglang.channel import Channel

_JOIN_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
_POLL_SECONDS = 0.01


class AnnouncedUpdates:
    """The updates of one lane into one server: its group is joined before the first and left at the end.

    Args:
        channel: to the server.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._group: UpdateGroup | None = None
        self._name = ""

    def send(
        self, move: RequestMove, group: AnnouncedGroup, body: str, tensors: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Moves one bucket; returns once the server has loaded it.

        A failure leaves the group: the next update joins another, under another name.

        Raises:
            EngineError: the server refused the group or the update, or the connection broke.
            SyncTimeoutError: it did not take part in time.
        """
        try:
            joined = self._joined(group, move.timeout_seconds)
            request = _announcement(body, self._name, tensors)
            announced = Beside(lambda: self._post(move.route, request, move.timeout_seconds))
            # Nothing that can fail on this side comes between: the schedulers wait in the broadcast already.
            # Bounded by its last argument.
            joined.broadcast([tensor for _, tensor in tensors], announced.check, move.timeout_seconds)
            announced.value(f"{move.route} at {self._channel.url}", move.timeout_seconds)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Has the server drop its end, which also ends what this end still sends; then drops ours."""
        group, self._group = self._group, None
        if group is None:
            return
        with suppress(EngineError):  # a server that is gone has dropped it
            self._destroy()
        group.close()

    def _destroy(self) -> None:
        self._post(DESTROY_GROUP_ROUTE, {"group_name": self._name}, _LEAVE_SECONDS)

    def _joined(self, group: AnnouncedGroup, seconds: float) -> UpdateGroup:
        if self._group is None:
            self._name = f"weightlane-{uuid.uuid4().hex[:16]}"
            try:
                self._group = self._join(group, seconds)
            except BaseException:
                with suppress(EngineError):  # it may not have got so far
                    self._destroy()
                raise
        return self._group

    def _join(self, group: AnnouncedGroup, seconds: float) -> UpdateGroup:
        """Both ends wait for each other: each is made beside the other, and the first error ends both."""
        address = serving_address(self._channel.host)
        store, port = serve_group_store(address, _JOIN_SECONDS)
        request = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": group.workers + 1,
            "group_name": self._name,
            "backend": group.backend,
        }
        theirs = Beside(lambda: self._post(INIT_GROUP_ROUTE, request, _JOIN_SECONDS))
        ours = Beside(lambda: UpdateGroup(store, self._name, group, seconds))
        left = _JOIN_SECONDS
        while not (ours.wait(_POLL_SECONDS) and theirs.wait(_POLL_SECONDS)):
            theirs.check()
            left -= _POLL_SECONDS
            if left <= 0:
                break
        theirs.value(f"{INIT_GROUP_ROUTE} at {self._channel.url}", _POLL_SECONDS)
        return ours.value(f"The group of {self._channel.url}", _POLL_SECONDS)

    def _post(self, route: str, fields: dict[str, object], seconds: float) -> None:
        body = msgspec.json.encode(fields)
        self._channel.send("POST", route, timeout_seconds=seconds, body=(body,), length=len(body))


def _announcement(body: str, name: str, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, object]:
    fields = msgspec.json.decode(body, type=dict[str, object])
    return {
        **fields,
        "names": [name for name, _ in tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "group_name": name,
    }
