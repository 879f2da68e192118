"""Collectives in a lane's own groups that end when another rank fails, or when their time is up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weightlane.errors import ExportError
from weightlane.waiting import wait_until

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from weightlane.contexts import StreamContext

# Renamed in torch 2.13, which warns of the older name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """All of one sync's, on one rank, on bytes.

    On the CPU each call waits for its own end. On a GPU it is queued, and `settle` waits for all so far: the
    trainer's thread would else stand still between any two of them. A rank that gives up ends the lane's own
    NCCL communicators, since nothing else frees a GPU of a collective that its peers never join; the group
    counts as broken from then on, and the lane says so.

    Args:
        context: groups, check and bound.
        device: where the groups compute.
    """

    def __init__(self, context: StreamContext, device: torch.device) -> None:
        self._context = context
        self.device = device

    def all_gather(self, out: Tensor, mine: Tensor, ranks: tuple[int, ...]) -> None:
        """`mine` of each rank, in order, into `out`: uint8, contiguous, `len(ranks)` times as long."""
        group = self._group(ranks)
        # Bounded by `_await`: queued here, waited for there with a bound and the check.
        self._end(_all_gather(out, mine, group=group, async_op=True))

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> None:
        """`tensor` (uint8, contiguous) of global rank `source` to all of `ranks`, in place."""
        group = self._group(ranks)
        # Bounded by `_await`: queued here, waited for there with a bound and the check.
        self._end(dist.broadcast(tensor, src=source, group=group, async_op=True))

    def settle(self) -> None:
        """Returns when everything queued so far is done."""
        if self.device.type != "cuda":
            return
        event = torch.cuda.current_stream(self.device).record_event()
        self._await(event.query)

    @property
    def rank(self) -> int:
        return self._context.export.rank

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self._context.export.world_size))

    def _group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        group = self._context.group if ranks == self.everyone else self._context.groups.get(ranks)
        if group is None:
            raise ExportError(
                f"The lane has no group of ranks {', '.join(map(str, ranks))}.",
                "The model's meshes were changed after connect.",
                "Close the lane and connect again.",
            )
        return group

    def _end(self, work: Any) -> None:
        if self.device.type != "cuda":
            self._await(work.is_completed)
        # On the CPU it is complete, and this raises what it failed with; on a GPU it orders streams.
        work.wait()  # bounded by `_await` above

    def _await(self, done: Any) -> None:
        seconds = self._context.collective_seconds
        try:
            ended = wait_until(done, seconds=seconds, check=self._context.check)
        except BaseException:
            self._abort()
            raise
        if not ended:
            self._abort()
            raise ExportError(
                f"A collective of rank {self._context.export.rank} did not end within {seconds:g} s.",
                "Another rank has not joined it.",
                "Look for what the other ranks were doing; close the lane and connect again.",
            )

    def _abort(self) -> None:
        """Frees the GPU. gloo needs no such thing: what is pending there holds a thread, not the device."""
        if self.device.type != "cuda":
            return
        groups = {
            id(group): group for group in (self._context.group, *self._context.groups.values()) if group
        }
        for group in groups.values():
            backend: Any = group._get_backend(self.device)
            for name in ("abort", "_abort", "_shutdown"):
                if hasattr(backend, name):
                    getattr(backend, name)()
                    break
