"""What the groups of a lane hold of the system is given back when the lane is closed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from weightlane.lane_groups import LaneGroups

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def groups() -> LaneGroups:
    whole, part = (dist.new_group([0], timeout=timedelta(seconds=5), backend="gloo") for _ in range(2))
    return LaneGroups(whole, {(0,): whole, (1,): part})


@pytest.mark.usefixtures("one_rank")
def test_lanes_that_are_closed_leave_no_thread_of_their_groups() -> None:
    groups().close()
    before = threads()
    for _ in range(5):
        groups().close(broken=True)  # gloo's end at once, even with a collective that was left
    assert threads() == before
    kept = [groups() for _ in range(5)]  # the control: what is not closed stays
    assert threads() >= before + len(kept)


@pytest.mark.usefixtures("one_rank")
def test_groups_that_the_trainer_destroyed_before_are_let_alone() -> None:
    made = groups()
    dist.destroy_process_group()
    made.close()
    made.close()
