"""Which transport a replica gets, why not another, and which rank feeds which worker."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from weightlane.errors import Problem
from weightlane.manifest import RankManifest
from weightlane.peers import choose_transport, form_peers
from weightlane.probes import always_viable
from weightlane.receiver import WorkerDescription
from weightlane.types import BackendDescriptor, Capability, Phase, TransportName

HERE = socket.gethostname()
EVERY = tuple(TransportName)


def backend(transports: tuple[TransportName, ...] = EVERY, *, agent: bool = True) -> BackendDescriptor:
    return BackendDescriptor(
        name="acme",
        role="rollout",
        engine="acme",
        era="now",
        versions=SpecifierSet(""),
        distributions=("acme",),
        probe=always_viable,
        capabilities=frozenset({Capability.WORKER_AGENT} if agent else ()),
        transports=transports,
    )


def worker(number: int = 0, *, host: str = HERE, process_id: int = -1, workers: int = 1) -> WorkerDescription:
    return WorkerDescription(number, workers, host, process_id, "i")


def ranks(*hosts: str) -> list[RankManifest]:
    return [RankManifest(rank, len(hosts), Phase.FULL, (), host=host) for rank, host in enumerate(hosts)]


def choose(
    workers: list[WorkerDescription],
    parts: list[RankManifest],
    descriptor: BackendDescriptor | None = None,
    wanted: TransportName | None = None,
    folder: str = "",
) -> Any:
    return choose_transport(descriptor or backend(), workers, parts, wanted=wanted, folder=folder)


def test_the_same_process_goes_by_reference() -> None:
    assert choose([worker(process_id=os.getpid())], ranks(HERE)) is TransportName.INPROCESS


def test_the_same_process_number_on_another_host_does_not() -> None:
    far = [worker(host="elsewhere", process_id=os.getpid())]
    assert choose(far, ranks(HERE)) is TransportName.INLINE


def test_two_workers_never_go_by_reference() -> None:
    mine = os.getpid()
    assert choose([worker(0, process_id=mine), worker(1, process_id=mine)], ranks(HERE)) is TransportName.SHM


def test_one_host_gets_a_ring() -> None:
    assert choose([worker(0), worker(1)], ranks(HERE, HERE, HERE)) is TransportName.SHM


@pytest.mark.parametrize(
    ("worker_hosts", "rank_hosts"),
    [(["far"], [HERE]), ([HERE, "far"], [HERE]), ([HERE], [HERE, "far"]), (["far"], [HERE, "far"])],
)
def test_more_than_one_host_goes_by_value(worker_hosts: list[str], rank_hosts: list[str]) -> None:
    workers = [worker(number, host=host) for number, host in enumerate(worker_hosts)]
    assert choose(workers, ranks(*rank_hosts)) is TransportName.INLINE
    refused = choose(workers, ranks(*rank_hosts), wanted=TransportName.SHM)
    assert isinstance(refused, Problem)
    assert "far" in refused.what


def test_without_an_agent_there_is_no_ring() -> None:
    refused = choose([worker()], ranks(HERE), backend(agent=False), TransportName.SHM)
    assert "no agent" in refused.what
    assert choose([worker()], ranks(HERE), backend(agent=False)) is TransportName.INLINE


def test_a_wish_that_can_be_met_is_met_and_one_that_cannot_is_never_replaced() -> None:
    assert choose([worker()], ranks(HERE), wanted=TransportName.INLINE) is TransportName.INLINE
    refused = choose([worker()], ranks(HERE), wanted=TransportName.INPROCESS)
    assert (refused.kind, refused.subject) == ("transport", "inprocess")
    assert "another process" in refused.what


def test_a_folder_is_never_chosen_unasked_and_the_refusal_says_that_it_could_be() -> None:
    disk_alone = backend((TransportName.DISK,))
    refused = choose([worker()], ranks(HERE), disk_alone)
    assert isinstance(refused, Problem)
    assert "disk: it could, and is taken only when asked for" in refused.what
    assert "transport='disk'" in refused.fix
    assert choose([worker()], ranks(HERE), disk_alone, TransportName.DISK) is TransportName.DISK
    assert form_peers(TransportName.DISK, [worker(0), worker(1)], ranks(*[HERE] * 4)) == (0, 0)


def test_a_temporary_folder_of_another_host_is_refused_and_a_named_one_is_not() -> None:
    far = [worker(0), worker(1, host="far")]
    refused = choose(far, ranks(HERE), wanted=TransportName.DISK)
    assert (refused.kind, refused.subject) == ("transport", "disk")
    assert "workers on far do not see a temporary folder" in refused.what
    assert choose(far, ranks(HERE), wanted=TransportName.DISK, folder="/shared") is TransportName.DISK
    assert choose([worker()], ranks(HERE, "far"), wanted=TransportName.DISK) is TransportName.DISK
    refused = choose([worker(host="far")], ranks("far", HERE), backend(agent=False), TransportName.DISK)
    assert "no agent" in refused.what


def test_no_transport_at_all_tells_why_for_each() -> None:
    refused = choose([worker(host="far")], ranks(HERE), backend((TransportName.SHM,)))
    assert isinstance(refused, Problem)
    for told in (
        "inprocess: backend acme does not declare it",
        "shm: workers on far",
        "inline: backend acme",
        "disk: backend acme",
    ):
        assert told in refused.what
    assert refused.fix == ""


@pytest.mark.parametrize(
    ("workers", "world_size", "peers"), [(2, 4, (0, 1)), (2, 1, (0, 0)), (4, 2, (0, 1, 0, 1)), (1, 1, (0,))]
)
def test_over_a_ring_ranks_are_dealt_to_workers(
    workers: int, world_size: int, peers: tuple[int, ...]
) -> None:
    described = [worker(number, workers=workers) for number in range(workers)]
    every = ranks(*[HERE] * world_size)
    assert form_peers(TransportName.SHM, described, every) == peers
    assert form_peers(TransportName.INLINE, described, every) == (0,) * workers


def on_gpus(*places: str) -> list[RankManifest]:
    """Ranks of this host by the GPU that they export from, "" for none."""
    return [
        RankManifest(rank, len(places), Phase.FULL, (), host=HERE, gpu_uuid=place)
        for rank, place in enumerate(places)
    ]


def on_gpu(number: int, place: str, *, host: str = HERE, workers: int = 1) -> WorkerDescription:
    return WorkerDescription(number, workers, host, -1, "i", device="cuda:0", gpu_uuid=place)


def test_one_gpu_for_rank_and_worker_gives_its_memory() -> None:
    assert choose([on_gpu(0, "A")], on_gpus("A")) is TransportName.CUDA_IPC
    assert choose([on_gpu(0, "B"), on_gpu(1, "A")], on_gpus("A", "B")) is TransportName.CUDA_IPC
    assert choose([on_gpu(0, "A")], on_gpus("A"), wanted=TransportName.SHM) is TransportName.SHM
    undeclared = backend((TransportName.SHM,))
    assert choose([on_gpu(0, "A")], on_gpus("A"), undeclared) is TransportName.SHM


@pytest.mark.parametrize(
    ("workers", "parts", "why"),
    [
        ([worker()], on_gpus("A"), "worker 0 runs on cpu"),
        ([on_gpu(0, "A")], on_gpus(""), "no trainer rank exports from GPU A of"),
        ([on_gpu(0, "A"), on_gpu(1, "B")], on_gpus("A", "A"), "GPU B"),
        ([on_gpu(0, "A", host="far")], on_gpus("A"), "GPU A of far"),
        ([on_gpu(0, "")], on_gpus(""), "does not tell its GPU's UUID"),
    ],
)
def test_another_gpu_or_none_is_refused_by_name_and_never_chosen(
    workers: list[WorkerDescription], parts: list[RankManifest], why: str
) -> None:
    refused = choose(workers, parts, wanted=TransportName.CUDA_IPC)
    assert isinstance(refused, Problem)
    assert (refused.kind, refused.subject) == ("transport", "cuda_ipc")
    assert why in refused.what
    assert choose(workers, parts) is not TransportName.CUDA_IPC


def test_without_an_agent_no_gpu_memory_is_mapped() -> None:
    refused = choose([on_gpu(0, "A")], on_gpus("A"), backend(agent=False), TransportName.CUDA_IPC)
    assert "no agent runs in the engine's worker" in refused.what


@pytest.mark.parametrize(
    ("workers", "places", "peers"),
    [
        (["A", "B"], ["B", "A"], (1, 0)),
        (["A", "A"], ["A", "B", "A"], (0, 2)),
        (["B"], ["A", "B", "B", ""], (1,)),
    ],
)
def test_each_worker_is_fed_by_a_rank_on_its_own_gpu(
    workers: list[str], places: list[str], peers: tuple[int, ...]
) -> None:
    described = [on_gpu(number, place, workers=len(workers)) for number, place in enumerate(workers)]
    assert form_peers(TransportName.CUDA_IPC, described, on_gpus(*places)) == peers
    # A second replica on the same GPUs starts with the next rank of each.
    if places.count("A") == 2:
        assert form_peers(TransportName.CUDA_IPC, described, on_gpus(*places), first=1) == (2, 0)
