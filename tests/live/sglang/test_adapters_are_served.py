"""Mode adapter to SGLang: whoever names the adapter is answered as by the trainer, in both swap policies."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError, SyncError
from weightlane.testing.demo_run import run_demo_command
from weightlane.testing.parity_run import run_parity
from weightlane_sglang.adapter_shelf import ServerAdapters

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane_sglang.endpoint import SglangEndpoint
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))
TOKENS = 8
AGREES = 1e-4
MOVED = 1e-2
MODULES = 14


def open_lane(trainer: Any, server: RunningServer, **options: Any) -> Any:
    return wl.connect(
        trainer=wl.trainer("torch", model=trainer.model, adapter=options.pop("adapter", None)),
        rollout=[wl.rollout("sglang", url=server.url)],
        mode="adapter",
        bucket_bytes=8 << 10,  # many buckets
        **options,
    )


def said(lane: Any, tokens: int = TOKENS) -> Any:
    return lane.replicas[0].generate(PROMPTS, max_tokens=tokens, adapter=lane.adapter_ref())


whole_send = ServerAdapters._send


def send_of_rank_64(self: ServerAdapters, move: Any, load: Any) -> None:
    """What the server was not started for: no plan would let it pass."""
    whole_send(self, move, replace(load, wire=load.wire.replace('"r":4', '"r":64')))


def three_syncs(trainer: Any, server: RunningServer, swap: str, ranks: int) -> None:
    """Three syncs, each moves the trainer and then matches it; the base comes with the first alone."""
    with open_lane(trainer, server, swap=swap) as lane:
        endpoint, before = lane.replicas[0], None
        for version in (1, 2, 3):
            assert trainer.change(seed=version) >= MOVED
            truth = trainer.truth(PROMPTS, TOKENS)
            if before is not None:
                old = endpoint.generate(PROMPTS, max_tokens=TOKENS, adapter=before)
                assert truth.distance(old) >= MOVED, "stale would pass"
            report = lane.sync(version=version)
            phases = [phase.phase.value for phase in report.phases]
            assert phases == (["adapter"] if before else ["base", "adapter"])
            assert f"adapter bound to {MODULES} of {MODULES} modules" in report.replicas[0].verified
            ref = lane.adapter_ref()
            assert ref == AdapterRef(f"default@{version}" if swap == "two_slot" else "default", version)
            generations = said(lane)
            assert truth.distance(generations) <= AGREES
            assert {generation.weight_version for generation in generations} == {version}
            if swap == "two_slot" and before is not None:
                with pytest.raises(EngineError, match="status 400"):  # and the server lives
                    endpoint.generate(PROMPTS, max_tokens=1, adapter=before)
            before = ref
        with pytest.raises(EngineError, match="names no adapter"):
            endpoint.generate(PROMPTS, max_tokens=1)
        assert endpoint.facts().parallel.tensor == ranks


@pytest.mark.requirement("R31")
@pytest.mark.requirement("R90", part="adapters at TP 2")
@pytest.mark.parametrize("swap", ["two_slot", "paused"])
def test_three_syncs_each_move_and_match_the_trainer_on_two_ranks(
    lora_server: RunningServer, tiny_folder: Path, adapter_trainer_of: type, swap: str
) -> None:
    three_syncs(adapter_trainer_of(tiny_folder), lora_server, swap, 2)


def test_ranks_scales_and_missing_siblings_that_sglang_ignores_are_folded_into_what_it_reads(
    lora_server: RunningServer, tiny_folder: Path, adapter_trainer_of: type
) -> None:
    trainer = adapter_trainer_of(
        tiny_folder,
        target_modules=["k_proj", "gate_proj", "down_proj"],  # no query, no value, no up
        use_rslora=True,
        rank_pattern={"gate_proj": 2},
        alpha_pattern={"layers.1.mlp.down_proj": 24},
    )
    with open_lane(trainer, lora_server) as lane:
        assert "form normal" in str(lane.plan())
        for version in (1, 2):
            assert trainer.change(seed=version) >= MOVED
            lane.sync(version=version)
            assert trainer.truth(PROMPTS, TOKENS).distance(said(lane)) <= AGREES


@pytest.mark.requirement("R68")
@pytest.mark.parametrize("swap", ["two_slot", pytest.param("paused", marks=pytest.mark.long_run)])
def test_a_load_that_the_server_refuses_leaves_the_old_adapter_serving_or_the_server_fenced(
    lora_server: RunningServer,
    tiny_folder: Path,
    adapter_trainer_of: type,
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
) -> None:
    trainer = adapter_trainer_of(tiny_folder)
    with open_lane(trainer, lora_server, swap=swap) as lane:
        lane.sync(version=1)
        ref, truth = lane.adapter_ref(), trainer.truth(PROMPTS, TOKENS)
        assert trainer.change(seed=5) >= MOVED
        with monkeypatch.context() as patch:
            patch.setattr(ServerAdapters, "_send", send_of_rank_64)
            with pytest.raises(EngineError, match=r"status 400.*rank 64 is incompatible"):
                lane.sync(version=2)
        if swap == "two_slot":
            assert lane.adapter_ref() == ref
            assert truth.distance(said(lane)) <= AGREES
        lane.sync(version=3)
        assert trainer.truth(PROMPTS, TOKENS).distance(said(lane)) <= AGREES


@pytest.mark.parametrize("swap", ["two_slot", pytest.param("paused", marks=pytest.mark.long_run)])
def test_requests_that_run_end_with_the_adapter_that_they_name_or_are_aborted_by_the_pause(
    lora_server: RunningServer,
    tiny_folder: Path,
    adapter_trainer_of: type,
    open_server: Callable[[RunningServer], SglangEndpoint],
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
) -> None:
    monkeypatch.setattr("weightlane_sglang.adapter_shelf._GRACE_SECONDS", 0.05)  # requests are short here
    trainer, endpoint, long = adapter_trainer_of(tiny_folder), open_server(lora_server), 230
    with open_lane(trainer, lora_server, swap=swap) as lane, ThreadPoolExecutor(1) as pool:
        lane.sync(version=1)
        first, truth = lane.adapter_ref(), trainer.truth(PROMPTS, long)
        running = pool.submit(endpoint.generate, PROMPTS, max_tokens=long, adapter=first)
        time.sleep(0.5)
        assert trainer.change(seed=4) >= MOVED
        lane.sync(version=2)
        assert not (swap == "two_slot" and running.done()), "it was to run through the sync"
        assert trainer.truth(PROMPTS, TOKENS).distance(said(lane)) <= AGREES
        if swap == "two_slot":
            assert truth.distance(running.result(120)) <= AGREES
        else:
            with pytest.raises(EngineError, match="abort"):
                running.result(120)
        lane.sync(version=3)


def test_what_a_trainer_that_is_gone_left_is_taken_over_by_the_next(
    lora_server: RunningServer, tiny_folder: Path, adapter_trainer_of: type
) -> None:
    trainer = adapter_trainer_of(tiny_folder)
    with open_lane(trainer, lora_server) as lane:
        lane.sync(version=1)
        lane.sync(version=2)
        with pytest.raises(SyncError, match="default@2 is loaded"):
            lane.sync(version=2)
    assert trainer.change(seed=9) >= MOVED
    with open_lane(trainer, lora_server) as lane:
        lane.sync(version=2)
        assert trainer.truth(PROMPTS, TOKENS).distance(said(lane)) <= AGREES
        lane.sync(version=1)
        assert trainer.truth(PROMPTS, TOKENS).distance(said(lane)) <= AGREES


@pytest.mark.requirement("R88", part="4 steps from two FSDP ranks at TP 2")
def test_the_demo_passes_with_an_adapter_of_two_fsdp_ranks(
    lora_server: RunningServer, tiny_folder: Path, tmp_path: Path
) -> None:
    words = ["--trainer", "fsdp", "--rollout", "sglang", "--mode", "adapter", "--steps", "4"]
    document = run_demo_command(
        [*words, "--url", lora_server.url, "--model", str(tiny_folder)], folder=tmp_path, seconds=800
    )
    assert document["verdict"] == "PASS", document["reasons"]
    log = lora_server.log.read_text(encoding="utf-8", errors="replace")
    assert log.count('/load_lora_adapter_from_tensors HTTP/1.1" 200') >= 4


@pytest.mark.long_run
def test_a_server_that_is_started_anew_between_syncs_is_sent_the_base_again(
    start_server: Any,
    tiny_folder: Path,
    adapter_trainer_of: type,
    lora_arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = adapter_trainer_of(tiny_folder)
    with start_server(tiny_folder, 1, arguments=lora_arguments) as server:
        port = int(server.url.rpartition(":")[2])
        lane = open_lane(trainer, server)
        lane.sync(version=1)
    monkeypatch.setattr("weightlane_sglang.launch._free_port", lambda: port)
    with lane, start_server(tiny_folder, 1, arguments=lora_arguments):
        assert trainer.change(seed=2) >= MOVED
        report = lane.sync(version=2)
        assert [phase.phase.value for phase in report.phases] == ["base", "adapter"]
        assert report.rejoined == (0,)
        assert trainer.truth(PROMPTS, TOKENS).distance(said(lane)) <= AGREES


@pytest.mark.long_run
@pytest.mark.requirement("R88", part="50 steps")
def test_an_adapter_of_fsdp_does_not_part_from_the_rollout_in_fifty_steps(
    lora_server: RunningServer, tiny_folder: Path
) -> None:
    options: dict[str, str | int | float] = {"trainer": "fsdp", "mode": "adapter", "training": "optimizer"}
    options |= {"learning-rate": 0.02, "tokens": 6, "bucket-bytes": 16 << 10}
    run_parity(
        model=tiny_folder, engine="sglang", url=lora_server.url, ranks=2, syncs=50, seconds=1000,
        options=options,
    )  # fmt: skip


@pytest.mark.parametrize("swap", ["two_slot", pytest.param("paused", marks=pytest.mark.long_run)])
def test_sglang_of_update_sessions_takes_adapters_without_one(
    newer_lora_server: RunningServer, tiny_folder: Path, adapter_trainer_of: type, swap: str
) -> None:
    three_syncs(adapter_trainer_of(tiny_folder), newer_lora_server, swap, 1)
