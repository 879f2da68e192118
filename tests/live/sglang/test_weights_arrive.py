"""After a sync by a lane SGLang generates what the trainer's model generates, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.errors import PlanError
from weightlane.testing.parity_run import run_parity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightlane.testing.parity_result import SyncParity
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

REAL = "SmolLM2-135M-Instruct"


def synced(
    server: RunningServer,
    model: Path,
    *,
    ranks: int,
    syncs: int,
    bucket_bytes: int,
    options: dict[str, str | int] | None = None,
) -> list[SyncParity]:
    found = run_parity(
        model=model,
        engine="sglang",
        url=server.url,
        ranks=ranks,
        syncs=syncs,
        seconds=1500,
        options={"bucket-bytes": bucket_bytes, "tokens": 6, **(options or {})},
        plan_says="coverage proven: ",
    )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, syncs + 1)]
    read_back = ["elements read back equal" in parity.verified[0] for parity in found]
    assert read_back == [True] + [False] * (syncs - 1), "a lane's first sync is read back"
    return found


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        (1, "replicated"),
        pytest.param(2, "replicated", marks=pytest.mark.long_run),
        (4, "replicated"),
        (4, "partitioned"),
    ],
)
def test_ranks_sync_a_small_model_in_many_buckets(
    tiny_server: RunningServer, tiny_folder: Path, ranks: int, placement: str
) -> None:
    placed: dict[str, str | int] = {"placement": placement}
    synced(tiny_server, tiny_folder, ranks=ranks, syncs=3, bucket_bytes=64 << 10, options=placed)


@pytest.fixture(scope="module")
def real_server(start_server: Any, models_dir: Path) -> Iterator[RunningServer]:
    """The real model at TP 1."""
    with start_server(models_dir / REAL, 1) as server:
        yield server


@pytest.mark.parametrize("mode", ["full", "merged"])
def test_fsdp2_on_two_ranks_sync_a_small_model(
    tiny_server: RunningServer, tiny_folder: Path, mode: str
) -> None:
    sharded: dict[str, str | int] = {"trainer": "fsdp", "mode": mode, "training": "optimizer"}
    sharded["learning-rate"] = 0.05 if mode == "merged" else 0.001
    found = synced(tiny_server, tiny_folder, ranks=2, syncs=3, bucket_bytes=64 << 10, options=sharded)
    assert [parity.phases for parity in found] == [(mode,)] * 3


@pytest.mark.long_run
@pytest.mark.requirement("R90", part="no LoRA, TP 1 and 2")
@pytest.mark.parametrize("mode", ["full", "merged"])
def test_fsdp2_on_two_ranks_matches_over_optimizer_steps(
    models_dir: Path, real_server: RunningServer, mode: str, syncs: int
) -> None:
    sharded: dict[str, str | int] = {"trainer": "fsdp", "mode": mode, "training": "optimizer"}
    model = models_dir / REAL
    found = synced(real_server, model, ranks=2, syncs=syncs, bucket_bytes=32 << 20, options=sharded)
    assert [parity.phases for parity in found] == [(mode,)] * syncs


@pytest.mark.requirement("R90", part="no LoRA, TP 1 and 2")
def test_a_real_model_at_tp_2_matches_after_each_sync(start_server: Any, models_dir: Path) -> None:
    model = models_dir / f"{REAL}-tp2"
    with start_server(model, 2) as server:
        synced(server, model, ranks=1, syncs=10, bucket_bytes=32 << 20)


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
