"""After a sync by a lane SGLang generates what the trainer's model generates, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.errors import PlanError
from weightlane.testing.parity_run import run_parity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


def synced(
    server: RunningServer,
    model: Path,
    *,
    ranks: int,
    syncs: int,
    bucket_bytes: int,
    placement: str = "replicated",
) -> None:
    found = run_parity(
        model=model,
        engine="sglang",
        url=server.url,
        ranks=ranks,
        syncs=syncs,
        seconds=1500,
        options={"bucket-bytes": bucket_bytes, "placement": placement, "tokens": 6},
        plan_says="coverage proven: ",
    )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, syncs + 1)]
    read_back = ["elements read back equal" in parity.verified[0] for parity in found]
    assert read_back == [True] + [False] * (syncs - 1), "a lane's first sync is read back"


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("ranks", "placement"), [(1, "replicated"), (2, "replicated"), (4, "replicated"), (4, "partitioned")]
)
def test_ranks_sync_a_small_model_in_many_buckets(
    tiny_server: RunningServer, tiny_folder: Path, ranks: int, placement: str
) -> None:
    synced(tiny_server, tiny_folder, ranks=ranks, syncs=3, bucket_bytes=64 << 10, placement=placement)


@pytest.mark.requirement("R90", part="no LoRA, TP 1 and 2")
@pytest.mark.parametrize(
    ("folder", "tensor_parallel", "syncs"),
    [("SmolLM2-135M-Instruct", 1, 3), ("SmolLM2-135M-Instruct-tp2", 2, 10)],
)
def test_a_real_model_matches_after_each_sync(
    start_server: Any,
    models_dir: Path,
    folder: str,
    tensor_parallel: int,
    syncs: int,
) -> None:
    with start_server(models_dir / folder, tensor_parallel) as server:
        synced(server, models_dir / folder, ranks=1, syncs=syncs, bucket_bytes=32 << 20)


def test_a_wrong_shape_and_a_stranger_are_refused_before_the_server_hears_of_them(
    tiny_server: RunningServer, tiny_folder: Path, trainer_of: Callable[[Path], Any]
) -> None:
    tensors = dict(trainer_of(tiny_folder).tensors())
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32]
    tensors["model.strange.weight"] = tensors.pop("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(PlanError) as caught:
        wl.connect(
            trainer=wl.trainer("torch", model=tensors), rollout=[wl.rollout("sglang", url=tiny_server.url)]
        )
    assert {(problem.kind, problem.subject) for problem in caught.value.problems} == {
        ("shape", "model.norm.weight"),
        ("extra-name", "model.strange.weight"),
        ("missing-name", "model.layers.0.mlp.down_proj.weight"),
    }
