"""Live servers of other SGLang versions: after each sync they say what the trainer says, token for token."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import wire_requests
from other_versions import LIVE_VERSIONS

import weightlane as wl
from weightlane.errors import PlanError, SelectionError
from weightlane.testing.parity_run import run_parity
from weightlane_sglang.adapter_launch import lora_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kept_result import MatrixResult

    from weightlane.testing.parity_result import SyncParity
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(900)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))
SYNCS = 3
RANK = 16
AGREES = 1e-4
MOVED = 1e-2
SHARDED: dict[str, str | int | float] = {"trainer": "fsdp", "training": "optimizer", "learning-rate": 0.05}


@pytest.fixture(scope="module", params=LIVE_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def takes_adapters(sglang_versions: Path, version: str) -> bool:
    return wire_requests.takes_adapters(
        wire_requests.era_of(wire_requests.facts_of(sglang_versions / version))
    )


@pytest.fixture(scope="module")
def start(
    start_server: Any, tiny_folder: Path, sglang_versions: Path, version: str, takes_adapters: bool
) -> Callable[[], Any]:
    """Starts this version as a lane's user would, for adapters where it takes them."""
    arguments = lora_arguments(RANK, "two_slot", device="cpu") if takes_adapters else ()
    return lambda: start_server(tiny_folder, 1, arguments=arguments, newer=sglang_versions / version)


@pytest.fixture(scope="module")
def server(start: Callable[[], Any]) -> Iterator[RunningServer]:
    with start() as running:
        yield running


def synced(
    server: RunningServer, model: Path, *, ranks: int, options: dict[str, str | int | float], plan_says: str
) -> list[SyncParity]:
    found = run_parity(
        model=model, engine="sglang", url=server.url, ranks=ranks, syncs=SYNCS, seconds=400,
        options={"bucket-bytes": 64 << 10, "tokens": 6, **options}, plan_says=plan_says,
    )  # fmt: skip
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in range(1, SYNCS + 1)]
    return found


@pytest.mark.parametrize(("mode", "ranks"), [("full", 1), ("merged", 2)])
def test_weights_arrive_as_the_trainer_has_them(
    server: RunningServer,
    tiny_folder: Path,
    version: str,
    mode: str,
    ranks: int,
    matrix_result: MatrixResult,
) -> None:
    options = {"mode": mode, **(SHARDED if mode == "merged" else {})}
    found = synced(server, tiny_folder, ranks=ranks, options=options, plan_says="coverage proven: ")
    assert "elements read back equal" in found[0].verified[0]
    assert [parity.phases for parity in found] == [(mode,)] * SYNCS
    matrix_result.live(version, mode, found)


@pytest.mark.parametrize("swap", ["two_slot", "paused"])
def test_adapters_are_bound_and_served_or_refused_by_name(
    server: RunningServer,
    tiny_folder: Path,
    version: str,
    takes_adapters: bool,
    swap: Any,
    adapter_trainer_of: type,
    matrix_result: MatrixResult,
) -> None:
    if not takes_adapters:
        trainer = wl.trainer("torch", model=adapter_trainer_of(tiny_folder).model)
        with pytest.raises((PlanError, SelectionError), match="adapter"):
            wl.connect(
                trainer=trainer, rollout=[wl.rollout("sglang", url=server.url)], mode="adapter", swap=swap
            )
        matrix_result.of(version).adapters_refused = True
        return
    options = {"mode": "adapter", "swap": swap, **SHARDED}
    found = synced(server, tiny_folder, ranks=2, options=options, plan_says=f"adapter swap {swap}")
    assert all("adapter bound to 14 of 14 modules" in parity.verified[-1] for parity in found)
    matrix_result.live(version, f"adapter, {swap}", found)


def test_a_server_that_was_started_anew_is_noticed_by_the_next_sync(
    server: RunningServer,
    start: Callable[[], Any],
    tiny_folder: Path,
    version: str,
    takes_adapters: bool,
    trainer_of: type,
    adapter_trainer_of: type,
    monkeypatch: pytest.MonkeyPatch,
    matrix_result: MatrixResult,
) -> None:
    """The last: the server of the tests before it ends here. Its successor listens at the same address."""
    trainer = (adapter_trainer_of if takes_adapters else trainer_of)(tiny_folder)
    mode: Any = "adapter" if takes_adapters else "full"
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("sglang", url=server.url)],
        mode=mode,
    ) as lane:
        lane.sync(version=1)
        assert trainer.change(seed=1) >= MOVED
        again = [phase.phase.value for phase in lane.sync(version=2).phases]
        assert again == [mode], "the base that the server holds is not sent again"
        before = lane.state.replicas[0].incarnations
        os.killpg(server.process_id, signal.SIGKILL)
        monkeypatch.setattr("weightlane_sglang.launch._free_port", lambda: urlsplit(server.url).port)
        with start() as successor:
            assert successor.url == server.url
            assert trainer.change(seed=2) >= MOVED
            report = lane.sync(version=3)
            assert lane.state.replicas[0].incarnations != before
            sent = [phase.phase.value for phase in report.phases]
            assert sent == (["base", "adapter"] if takes_adapters else ["full"])
            given = lane.replicas[0].generate(
                PROMPTS, max_tokens=8, adapter=lane.adapter_ref() if takes_adapters else None
            )
            if takes_adapters:
                assert trainer.truth(PROMPTS, 8).distance(given) <= AGREES
            else:
                assert trainer.distance(PROMPTS, given) <= AGREES
    matrix_result.of(version).restart_noticed = True
