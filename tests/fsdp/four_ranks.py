"""The cases of four ranks: meshes of two dimensions."""

from __future__ import annotations

import importlib

import pytest
import tiny_models
import torch
import torch.distributed as dist
from case_running import run
from fsdp_cases import adapter_cases, full_cases
from fsdp_wrappers import FOUR_RANKS, hsdp2, tensor_parallel
from rank_export import lane_of, require_same, unsharded

from weightlane.errors import ExportError


def only_the_replica_that_serves_gathers() -> None:
    """Ranks 2 and 3 shard the same values; nobody there sends, so nothing is gathered there."""
    from weightlane_fsdp.gathering import Gathering

    gathered: list[int] = []
    together = Gathering.together
    wrapped = hsdp2(tiny_models.disturb(tiny_models.even()))
    with pytest.MonkeyPatch.context() as patch, lane_of(wrapped, serving=(0,)) as lane:
        patch.setattr(
            Gathering,
            "together",
            lambda self, items: (gathered.append(len(items)), together(self, items))[1],
        )
        given = lane.sync()
    require_same(given, unsharded(tiny_models.disturb(tiny_models.even())) if dist.get_rank() == 0 else {})
    assert bool(gathered) == (dist.get_rank() in (0, 1))


def fsdp1_over_tensor_parallel_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel

    importlib.import_module("torch.distributed.tensor.parallel.fsdp")  # tells FSDP1 of DTensors
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(tiny_models.even(), sharded=False, mesh=mesh)
    wrapped = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu")
    )
    with pytest.raises(ExportError, match="tensor-parallel tensor inside an FSDP1 unit"):
        lane_of(wrapped)


CASES = {
    "only the replica that serves gathers": only_the_replica_that_serves_gathers,
    "fsdp1 over tensor parallel": fsdp1_over_tensor_parallel_is_refused,
    **full_cases(FOUR_RANKS, {"even": tiny_models.even}),
    **full_cases(
        {name: wrap for name, wrap in FOUR_RANKS.items() if "tp" not in name}, {"dense": tiny_models.dense}
    ),
    **adapter_cases(
        {name: wrap for name, wrap in FOUR_RANKS.items() if "tp" not in name}, {"dense": tiny_models.dense}
    ),
}

if __name__ == "__main__":
    run(CASES)
