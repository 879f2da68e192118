"""Transport `inprocess`: trainer and engine worker share a process, so tensors go by reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.agent_calls import call_agents
from weightlane.endpoint import LocalEndpoint
from weightlane.errors import EngineError
from weightlane.messages import BeginInline, Done
from weightlane.packing import check_bucket, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.agent import WorkerAgent
    from weightlane.buckets import BucketLayout
    from weightlane.endpoint import EngineEndpoint
    from weightlane.plan import LanePlan, ReplicaPlan
    from weightlane.transports.sink import SinkBounds


class InprocessSink:
    """Hands the live tensors to the agent, whose loader copies them. Nothing to digest: nothing travels."""

    def __init__(self, plan: LanePlan, replica: ReplicaPlan, endpoint: EngineEndpoint) -> None:
        if not isinstance(endpoint, LocalEndpoint):
            raise EngineError(
                f"The endpoint of {replica.address} gives no agent in this process.",
                f"Backend {replica.backend} declares transport inprocess, whose endpoint must be a "
                "LocalEndpoint.",
                f"Choose another transport, and report this to {replica.distribution}.",
            )
        self._plan = plan
        self._replica = replica
        self._endpoint = endpoint
        self._agent: WorkerAgent = endpoint.local_agent()
        self._sync = 0

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:
        """Opens the sync on the worker; another incarnation refuses here."""
        self._sync = sync
        request = BeginInline(
            self._plan.lane,
            self._plan.digest(),
            sync,
            version,
            self._replica.incarnations,
            self._replica.generation,
        )
        call_agents(self._endpoint, request, Done, workers=1, seconds=bounds.bucket_seconds)

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """One call of the agent with (name, tensor) of the travelling dtype."""
        check_bucket(layout, self._plan.tensors, tensors)
        named = [
            (
                self._plan.tensors[number].name,
                tensor.detach().to(torch_dtype(self._plan.tensors[number].dtype)),
            )
            for number, tensor in tensors
        ]
        self._agent.load_by_reference(self._plan.lane, self._sync, layout.index, named)

    def finish(self) -> str:
        """No digest by reference."""
        return ""

    def abort(self, cause: str, *, sync: int | None = None) -> None:
        """The replica's session sends `Cancel`."""

    def close(self) -> None:
        """Holds nothing."""
