"""Transport `inline`: buckets by value, in agent messages or in the engine's own requests.

Only the controller holds the endpoint, so only rank 0 has such a sink.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightlane.agent_calls import call_agents
from weightlane.messages import BeginInline, Done, LoadInline
from weightlane.packing import WireDigest, check_bucket, memory_of, pack_bucket
from weightlane.transports.sink import cast_for_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.adapter_requests import RequestedAdapter
    from weightlane.buckets import BucketLayout
    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan, ReplicaPlan
    from weightlane.program import RequestMove
    from weightlane.request_read_back import RequestReadBack
    from weightlane.transports.sink import SinkBounds


class AgentInlineSink:
    """Sends each bucket's bytes to every worker's agent in one `LoadInline` message."""

    def __init__(self, plan: LanePlan, replica: ReplicaPlan, endpoint: EngineEndpoint) -> None:
        self._plan = plan
        self._replica = replica
        self._endpoint = endpoint
        self._buffer = torch.zeros(max(layout.nbytes for layout in plan.buckets), dtype=torch.uint8)
        self._sync = 0
        self._seconds = 0.0
        self._digest: WireDigest | None = None

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:
        """Opens the sync on every worker; a worker that is not the planned one refuses here."""
        self._sync, self._seconds = sync, bounds.bucket_seconds
        self._digest = WireDigest(self._plan.tensors) if self._plan.verify == "digest" else None
        request = BeginInline(
            self._plan.lane,
            self._plan.digest(),
            sync,
            version,
            self._replica.incarnations,
            self._replica.generation,
        )
        self._call(request)

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Packs and sends one bucket; returns when every worker has loaded it."""
        bucket = self._buffer[: layout.nbytes]
        pack_bucket(bucket, layout, self._plan.tensors, tensors)
        memory = memory_of(bucket)
        if self._digest:
            self._digest.update(memory, layout)
        self._call(LoadInline(self._plan.lane, self._sync, layout.index, bytes(memory)))

    def finish(self) -> str:
        """Nothing is in flight: every put waited for its answers."""
        return self._digest.hexdigest() if self._digest else ""

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """The replica's session sends `Cancel`; nothing waits here."""

    def close(self) -> None:
        """Drops the buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _call(self, request: BeginInline | LoadInline) -> None:
        call_agents(self._endpoint, request, Done, workers=len(self._replica.peers), seconds=self._seconds)


class AdapterRequestSink:
    """Gathers a whole adapter for the one request that carries it, which the replica's session sends."""

    def __init__(self, plan: LanePlan, adapter: RequestedAdapter) -> None:
        self._plan = plan
        self._adapter = adapter
        self._digest: WireDigest | None = None
        self._bounds: SinkBounds | None = None

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:  # noqa: ARG002 - a Sink's
        """Forgets what a sync before this one had gathered."""
        self._bounds = bounds
        self._adapter.begin()
        self._digest = WireDigest(self._plan.tensors) if self._plan.verify == "digest" else None

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Casts, and keeps a copy: the bucket's memory is written again."""
        if self._bounds:
            self._bounds.check()
        check_bucket(layout, self._plan.tensors, tensors)
        for number, tensor in tensors:
            wire = self._plan.tensors[number]
            ready = cast_for_wire(tensor, wire)
            if self._digest:
                self._digest.update_whole(memory_of(ready))
            self._adapter.gathered(wire.name, ready)

    def finish(self) -> str:
        """Nothing is sent yet."""
        return self._digest.hexdigest() if self._digest else ""

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """Nothing was sent; there is nobody to tell."""

    def close(self) -> None:
        """Drops what was gathered."""
        self._adapter.begin()


class RequestSink:
    """Sends each bucket in the engine's own request, as the program says; `read_back` hashes what is sent."""

    def __init__(
        self,
        plan: LanePlan,
        move: RequestMove,
        endpoint: EngineEndpoint,
        read_back: RequestReadBack | None = None,
    ) -> None:
        self._plan = plan
        self._move = move
        self._endpoint = endpoint
        self._read_back = read_back
        self._version = 0
        self._digest: WireDigest | None = None
        self._bounds: SinkBounds | None = None

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:  # noqa: ARG002 - a Sink's
        """Nothing is sent before the first bucket."""
        self._version, self._bounds = version, bounds
        if self._read_back:
            self._read_back.begin()
        self._digest = WireDigest(self._plan.tensors) if self._plan.verify == "digest" else None

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Casts, sends and waits for the engine's answer."""
        if self._bounds:
            self._bounds.check()
        check_bucket(layout, self._plan.tensors, tensors)
        named: list[tuple[str, Tensor]] = []
        for number, tensor in tensors:
            wire = self._plan.tensors[number]
            ready = cast_for_wire(tensor, wire)
            named.append((wire.name, ready))
            if self._digest:
                self._digest.update_whole(memory_of(ready))
        if self._read_back:
            self._read_back.sent(named)
        self._endpoint.send_bucket(self._move, named, last=layout.last, version=self._version)

    def finish(self) -> str:
        """Nothing is in flight: every put waited for its answer."""
        return self._digest.hexdigest() if self._digest else ""

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """The engine holds no open request between buckets; there is nobody to tell."""

    def close(self) -> None:
        """Holds nothing."""
