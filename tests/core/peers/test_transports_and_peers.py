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
    assert form_peers(TransportName.DISK, [worker(0), worker(1)], 4) == (0, 0)


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
    assert form_peers(TransportName.SHM, described, world_size) == peers
    assert form_peers(TransportName.INLINE, described, world_size) == (0,) * workers
