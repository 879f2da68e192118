"""One rank's place among workers that are not there, and the engine's process-wide caches kept clean.

vLLM builds a layer's shard by asking module-level groups for its rank. Here they are made of bare objects
that know ranks and sizes and can send nothing, for as long as a model is built on the meta device.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_OVER_WORKERS = ("_WORLD", "_TP", "_EP", "_EPLB", "_ETP")
_ALONE = ("_PP", "_DP", "_PCP", "_DCP", "_INNER_DP_WORLD")
_REQUIRED = {"_WORLD", "_TP", "_PP"}


@contextmanager
def place_of_rank(rank: int, workers: int) -> Iterator[None]:
    """vLLM's groups of this process are those of tensor-parallel `rank` of `workers`; then as they were.

    Not to be entered while an engine of this process runs a forward pass.

    Raises:
        LookupError: this vLLM keeps its groups elsewhere.
    """
    from vllm.distributed import parallel_state

    held = vars(parallel_state)
    missing = sorted(_REQUIRED - held.keys())
    if missing:
        raise LookupError(f"vllm.distributed.parallel_state has no {', '.join(missing)}")
    names = [name for name in (*_OVER_WORKERS, *_ALONE, "_NODE_COUNT") if name in held]
    before = {name: held[name] for name in names}
    try:
        for name in names:
            ranks = list(range(workers)) if name in _OVER_WORKERS else [rank]
            held[name] = 1 if name == "_NODE_COUNT" else _group(rank, ranks)
        yield
    finally:
        held.update(before)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """What of a process group a layer asks while it is built."""

    own: int
    count: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.count


def _group(rank: int, ranks: list[int]) -> Any:
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator

    group: Any = object.__new__(GroupCoordinator)  # its constructor would meet the other ranks
    group.rank, group.local_rank, group.device_index = rank, rank, rank
    group.ranks, group.group_ranks, group.world_size = ranks, [ranks], len(ranks)
    group.rank_in_group = ranks.index(rank)
    group.unique_name, group.device = f"weightlane:{rank}", torch.device("meta")
    group.cpu_group = group.device_group = _Ranks(group.rank_in_group, len(ranks))
    group.device_communicator = group.mq_broadcaster = None
    group.use_device_communicator = group.use_custom_op_call = False
    return group


@contextmanager
def clean_process() -> Iterator[None]:
    """Puts back what building a model changes for the whole process.

    vLLM keeps one rotary embedding for all models of the process: made on the meta device it would be given
    to the next real engine, which then fails. A configuration also sets environment variables.
    """
    import torch
    from vllm.model_executor.layers import rotary_embedding

    shared: dict[Any, Any] = rotary_embedding._ROPE_DICT
    ropes, environment, dtype = dict(shared), dict(os.environ), torch.get_default_dtype()
    shared.clear()  # nor may the model on meta be given the real ones
    try:
        yield
    finally:
        shared.clear()
        shared.update(ropes)
        torch.set_default_dtype(dtype)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
