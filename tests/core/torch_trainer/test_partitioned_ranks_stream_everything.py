"""Two gloo ranks that each hold half: those that serve are given every tensor as its holder has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from partitioned_ranks import as_bytes, some_of_every_dtype, streams_partitioned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.requirement("R16")
@pytest.mark.requirement("R63")
@pytest.mark.parametrize("serving", [(0, 1), (1,)], ids=["both serve", "rank 0 only drains"])
def test_every_dtype_and_size(
    start_peer: Callable[..., Any], tmp_path: Path, serving: tuple[int, ...]
) -> None:
    address = f"file://{tmp_path}/rendezvous"
    with (
        start_peer(streams_partitioned, address, 0, 2, serving) as first,
        start_peer(streams_partitioned, address, 1, 2, serving) as second,
    ):
        for seed in (0, 1):
            expected = {name: as_bytes(tensor) for name, tensor in some_of_every_dtype(seed).items()}
            for rank, peer in enumerate((first, second)):
                buckets, given = peer.told(60)
                assert buckets > 4
                assert given == (expected if rank in serving else {})
        for peer in (first, second):
            peer.pipe.send("end")
            peer.process.join(10)
            assert peer.process.exitcode == 0
