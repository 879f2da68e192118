"""The process groups of one lane: made at connect, with a timeout of their own, never the user's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from weightlane.manifest import Manifest

_WATCHDOG_MARGIN = 60.0
"""Seconds that NCCL's own watchdog waits beyond ours. It ends the process; a stream that gives up first does
not."""


@dataclass(frozen=True, slots=True)
class LaneGroups:
    """`everyone` is None where the manifest needs no collective; `parts` are those of `Manifest.groups`."""

    everyone: ProcessGroup | None = None
    parts: Mapping[tuple[int, ...], ProcessGroup] = field(default_factory=dict)

    def close(self, *, broken: bool = False) -> None:
        """Frees the threads and connections that each group holds. No collective; idempotent.

        Args:
            broken: a collective was left before its end. NCCL groups are kept then: destroying one waits for
                the kernel that hangs, and its watchdog ends that.
        """
        import torch.distributed as dist

        for group in {id(item): item for item in (self.everyone, *self.parts.values())}.values():
            # The trainer may have destroyed all groups, these too, before the lane is closed.
            if group is None or not dist.is_initialized() or group not in dist.distributed_c10d._world.pg_map:
                continue
            if broken and dist.get_backend(group) == "nccl":
                continue
            dist.destroy_process_group(group)


def make_groups(manifest: Manifest, seconds: float) -> LaneGroups:
    """The groups that a manifest's export gathers in; every rank calls it, since each group takes all.

    Args:
        manifest: the agreed one; its `groups` are in one order on all ranks.
        seconds: what one collective may take (`Bounds.collective`).
    """
    if not manifest.collective or manifest.world_size == 1:
        return LaneGroups()
    from datetime import timedelta

    import torch.distributed as dist

    nccl = manifest.group_backend == "nccl"
    timeout = timedelta(seconds=seconds + _WATCHDOG_MARGIN if nccl else seconds)

    def make(ranks: tuple[int, ...]) -> ProcessGroup:
        # The backend is the manifest's, whatever the trainer's own group is.
        group: ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=manifest.group_backend)
        return group

    everyone = tuple(range(manifest.world_size))
    whole = make(everyone)
    parts = {ranks: whole if ranks == everyone else make(ranks) for ranks in manifest.groups}
    mine = dist.get_rank()
    return LaneGroups(whole, {ranks: group for ranks, group in parts.items() if mine in ranks})
