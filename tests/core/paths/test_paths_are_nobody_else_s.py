"""Sockets and rings of different jobs, replicas and workers never share a path, whatever their names are."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from weightlane.buckets import lay_out_buckets
from weightlane.errors import SyncError
from weightlane.front.socket_folder import socket_folder
from weightlane.manifest import Manifest
from weightlane.messages import WireTensor
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import AgentMove, Program
from weightlane.transports.shm import ShmSink
from weightlane.types import Mode, Phase, TransportName

if TYPE_CHECKING:
    from collections.abc import Iterator

WIRES = (WireTensor("w", (4,), "float32"),)


def plan(lane: str) -> LanePlan:
    replica = ReplicaPlan(
        replica=0,
        engine="acme",
        engine_version="1",
        address="unix:/same",
        backend="acme",
        era="now",
        distribution="acme 1",
        evidence=(),
        notes=(),
        coverage="untraced",
        transport=TransportName.SHM,
        incarnations={0: "i", 1: "j"},
        peers=(0, 1),
        program=Program(AgentMove("shm")),
    )
    return LanePlan(
        lane=lane,
        mode=Mode.FULL,
        phase=Phase.FULL,
        world_size=2,
        trainer_backend="torch",
        manifest=Manifest(Phase.FULL, 2, ()),
        verify="counts",
        entries=(),
        tensors=WIRES,
        buckets=lay_out_buckets(WIRES),
        replicas=(replica, replace(replica, replica=1)),
    )


@pytest.fixture
def sinks() -> Iterator[list[ShmSink]]:
    """Two lanes of two replicas of two workers each, and the same again for a job with the same names."""
    made: list[ShmSink] = []
    try:
        for _, lane, replica, worker in itertools.product(range(2), ("lane", "lane-0"), range(2), range(2)):
            made.append(ShmSink(plan(lane), replica=replica, worker=worker))
        yield made
    finally:
        for sink in made:
            sink.close()


@pytest.mark.requirement("R65")
def test_every_worker_of_every_replica_of_every_job_has_a_ring_of_its_own(sinks: list[ShmSink]) -> None:
    assert len({sink.path for sink in sinks}) == len(sinks) == 16


@pytest.mark.requirement("R65")
def test_every_job_has_a_socket_folder_of_its_own() -> None:
    with socket_folder() as first, socket_folder() as second:
        assert first != second
        assert first not in second.parents
        assert second not in first.parents


@pytest.mark.requirement("R65")
def test_a_ring_s_path_is_never_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: two rings that do draw one name are an error, not one shared file."""
    from weightlane import ring_file

    monkeypatch.setattr(ring_file.secrets, "token_hex", lambda length: "same")
    first = ShmSink(plan("lane"), replica=0, worker=0)
    try:
        with pytest.raises(SyncError, match="File exists"):
            ShmSink(plan("lane"), replica=0, worker=0)
    finally:
        first.close()
