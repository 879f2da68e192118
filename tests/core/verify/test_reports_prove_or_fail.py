"""Reports prove equal counts and digests on every worker, or end in an error that says who differs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from weightlane.buckets import lay_out_buckets
from weightlane.errors import VerificationError
from weightlane.lane_messages import RankMoved
from weightlane.manifest import Manifest
from weightlane.messages import ReceiveReport, WireTensor
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import AgentMove, Program, RequestMove
from weightlane.types import Mode, Phase, TransportName
from weightlane.verify import verify_ranks, verify_replica

WIRES = (WireTensor("a", (3,), "float32"), WireTensor("b", (2,), "float16"))
NBYTES = 16


def replica(
    transport: TransportName = TransportName.SHM, *, peers: tuple[int, ...] = (0, 1), agent: bool = True
) -> ReplicaPlan:
    move: Any = AgentMove(transport.value) if agent else RequestMove("/r", "f", 1, "{}", "{}")
    return ReplicaPlan(
        0,
        "acme",
        "1",
        "unix:/x",
        "acme",
        "now",
        "acme 1",
        (),
        (),
        "untraced",
        transport,
        {},
        peers,
        Program(move),
    )


def plan(verify: Any = "digest", chosen: ReplicaPlan | None = None) -> LanePlan:
    return LanePlan(
        lane="lane-1",
        mode=Mode.FULL,
        phase=Phase.FULL,
        world_size=2,
        trainer_backend="torch",
        manifest=Manifest(Phase.FULL, 2, ()),
        verify=verify,
        entries=(),
        tensors=WIRES,
        buckets=lay_out_buckets(WIRES),
        replicas=(chosen or replica(),),
    )


def moved(*digests: str) -> list[RankMoved]:
    return [RankMoved(rank, 2, NBYTES, digest, 0.1) for rank, digest in enumerate(digests)]


def report(worker: int, **fields: Any) -> ReceiveReport:
    return replace(ReceiveReport(worker, 1, 1, 2, NBYTES, 2, "d", 0.0, 0.0), **fields)


def verify(
    *reports: ReceiveReport, level: str = "digest", digests: tuple[str, ...] = ("d", "d"), **options: Any
) -> str:
    chosen = replica(**options)
    return verify_replica(plan(level, chosen), chosen, moved(*digests), reports, sync=1, version=1).verified


def test_equal_reports_prove_counts_and_digests() -> None:
    assert verify(report(0), report(1)) == "counts equal on 2 workers, digests equal on 2"
    assert verify(report(0, digest=""), report(1, digest=""), level="counts", digests=("", "")) == (
        "counts equal on 2 workers"
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"tensors": 1}, "1 tensors received, 2 sent by rank 1"),
        ({"nbytes": 12}, "12 bytes received, 16 sent"),
        # a loader that reports success for less than it was sent
        ({"loaded": 0}, "0 tensors handed to the loader, 2 sent"),
        ({"digest": "e"}, "digest e, rank 1 sent d"),
        ({"digest": ""}, "gave no digest"),
    ],
)
def test_a_worker_that_differs_is_named(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(VerificationError, match="worker 1 of unix:/x") as caught:
        verify(report(0), report(1, **wrong))
    assert told in caught.value.what
    assert "worker 0" not in caught.value.what


def test_digests_are_not_asked_for_at_level_counts() -> None:
    assert "digest" not in verify(report(0, digest=""), report(1, digest=""), level="counts")


def test_a_rank_that_gives_no_digest_is_no_proof_either() -> None:
    with pytest.raises(VerificationError, match="rank 1 gave no digest"):
        verify(report(0), report(1), digests=("d", ""))


def test_two_reports_of_one_worker_are_not_two_workers() -> None:
    for reports in (
        (report(0), report(0)),
        (report(0),),
        (report(0), report(1), report(2)),
        (report(0), report(7)),
    ):
        with pytest.raises(VerificationError, match="not for each of 2 once"):
            verify(*reports)


def test_by_reference_there_is_no_digest_and_it_is_said() -> None:
    said = verify(report(0, digest=""), transport=TransportName.INPROCESS, peers=(0,), digests=("", ""))
    assert said == "counts equal on 1 worker, no digest: tensors went by reference"


def test_without_an_agent_nothing_is_claimed() -> None:
    assert verify(agent=False).startswith("unavailable")


def test_off_claims_nothing() -> None:
    assert verify(report(0, loaded=0), report(1), level="off") == "off"


def test_ranks_that_sent_different_bytes_are_named() -> None:
    assert verify_ranks(plan(), moved("d", "d")) == "d"
    assert verify_ranks(plan(), moved("", "d")) == "d"  # a rank that only drains
    assert verify_ranks(plan("counts"), moved("", "")) == ""
    with pytest.raises(VerificationError, match="rank 0 d, rank 1 e"):
        verify_ranks(plan(), moved("d", "e"))


@pytest.mark.parametrize("fields", [{"sync": 2}, {"version": 2}])
def test_a_report_of_another_sync_or_version_is_caught(fields: dict[str, int]) -> None:
    with pytest.raises(VerificationError, match="not sync 1 of version 1"):
        verify(report(0), report(1, **fields))
