"""Who feeds whom: the transport of a replica, and the trainer rank that is each worker's peer."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from weightlane.errors import Problem
from weightlane.types import Capability, TransportName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.manifest import RankManifest
    from weightlane.receiver import WorkerDescription
    from weightlane.types import BackendDescriptor


def choose_transport(
    descriptor: BackendDescriptor,
    workers: Sequence[WorkerDescription],
    ranks: Sequence[RankManifest],
    *,
    wanted: TransportName | None,
    folder: str = "",
) -> TransportName | Problem:
    """The transport for one replica: the user's choice if it can work, else the first that can.

    Order: by reference in one process, memory of the GPU that rank and worker share, a shared-memory ring on
    one host, by value over any distance. `disk` and `collective` are taken only
    when asked for. Runs on the controller, in
    whose process an engine handle lives. `folder` is the one that the user named for `disk`, if any.
    """
    reasons = {name: _hindrance(name, descriptor, workers, ranks, folder) for name in TransportName}
    if wanted is not None:
        hindrance = reasons[wanted]
        if hindrance:
            return Problem(
                "transport", wanted.value, hindrance, "Leave the transport open, or choose another."
            )
        return wanted
    for name in (TransportName.INPROCESS, TransportName.CUDA_IPC, TransportName.SHM, TransportName.INLINE):
        if not reasons[name]:
            return name
    by_disk = reasons[TransportName.DISK] or "it could, and is taken only when asked for"
    every = "; ".join(
        f"{name.value}: {reason}" for name, reason in {**reasons, TransportName.DISK: by_disk}.items()
    )
    fix = "" if reasons[TransportName.DISK] else "Pass transport='disk', with a folder= that both sides see."
    return Problem("transport", descriptor.name, f"no transport reaches this engine ({every})", fix)


def _hindrance(
    name: TransportName,
    descriptor: BackendDescriptor,
    workers: Sequence[WorkerDescription],
    ranks: Sequence[RankManifest],
    folder: str,
) -> str:
    if name not in descriptor.transports:
        return f"backend {descriptor.name} does not declare it"
    if name is TransportName.INPROCESS:
        here = (socket.gethostname(), os.getpid())
        if len(workers) != 1 or (workers[0].host, workers[0].process_id) != here:
            return "the engine's worker runs in another process"
        return ""
    if name is TransportName.CUDA_IPC:
        return _gpu_hindrance(descriptor, workers, ranks)
    if name is TransportName.SHM:
        if Capability.WORKER_AGENT not in descriptor.capabilities:
            return "no agent runs in the engine's worker"
        rank_hosts = {rank.host for rank in ranks}
        far = sorted({worker.host for worker in workers} - rank_hosts)
        if far or len(rank_hosts) != 1:
            worker_hosts = {worker.host for worker in workers}
            return (
                f"workers on {', '.join(sorted(worker_hosts))} and ranks on {', '.join(sorted(rank_hosts))} "
                "are not all on one host"
            )
        return ""
    if name is TransportName.DISK:
        return _disk_hindrance(descriptor, workers, ranks, folder)
    return ""


def _gpu_hindrance(
    descriptor: BackendDescriptor, workers: Sequence[WorkerDescription], ranks: Sequence[RankManifest]
) -> str:
    if Capability.WORKER_AGENT not in descriptor.capabilities:
        return "no agent runs in the engine's worker, which could map the GPU's memory"
    for worker in workers:
        if not worker.gpu_uuid:
            return (
                f"worker {worker.worker} runs on {worker.device}, or its torch does not tell its GPU's UUID"
            )
        if not _ranks_on_gpu_of(worker, ranks):
            held = sorted({f"{rank.gpu_uuid or rank.device} of {rank.host}" for rank in ranks})
            return (
                f"no trainer rank exports from GPU {worker.gpu_uuid} of {worker.host}, which worker "
                f"{worker.worker} runs on (they export from {', '.join(held)})"
            )
    return ""


def _ranks_on_gpu_of(worker: WorkerDescription, ranks: Sequence[RankManifest]) -> list[int]:
    place = (worker.host, worker.gpu_uuid)
    return [rank.rank for rank in ranks if rank.gpu_uuid and (rank.host, rank.gpu_uuid) == place]


def _disk_hindrance(
    descriptor: BackendDescriptor,
    workers: Sequence[WorkerDescription],
    ranks: Sequence[RankManifest],
    folder: str,
) -> str:
    if Capability.WORKER_AGENT not in descriptor.capabilities:
        return "no agent runs in the engine's worker, which could read the folder"
    writer = next((rank.host for rank in ranks if rank.rank == 0), "")
    far = sorted({worker.host for worker in workers} - {writer})
    if far and not folder:
        return f"workers on {', '.join(far)} do not see a temporary folder of {writer}; name one with folder="
    return ""


def form_peers(
    transport: TransportName,
    workers: Sequence[WorkerDescription],
    ranks: Sequence[RankManifest],
    *,
    first: int = 0,
) -> tuple[int, ...]:
    """The rank that feeds each worker.

    By value, by reference or through a folder everything goes through the controller. Over a ring,
    worker i has rank (`first` + i) mod ranks, over a GPU's memory counted among the ranks on that GPU alone;
    ranks left over only drain. `first` counts the workers of
    replicas before this one, so that several replicas share the ranks evenly.
    """
    if transport is TransportName.SHM:
        return tuple((first + worker.worker) % len(ranks) for worker in workers)
    if transport is TransportName.CUDA_IPC:
        near = [_ranks_on_gpu_of(worker, ranks) for worker in workers]
        return tuple(
            found[(first + worker.worker) % len(found)] for worker, found in zip(workers, near, strict=True)
        )
    return tuple(0 for _ in workers)
