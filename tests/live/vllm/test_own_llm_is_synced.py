"""An `LLM` object of the trainer's own process as the rollout: `wl.rollout("vllm", engine=llm)`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from live_ways import MODES, NEWEST, OLDER, Way, shown

from weightlane_vllm.launch import FrontStart, front_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


def ways(place: str, *modes: str, version: str = NEWEST) -> list[Way]:
    return [Way(place, "tiny", 1, mode, "torch", version) for mode in modes]


PROGRAM = Path(__file__).parent / "programs/sync_own_llm.py"


@pytest.mark.parametrize(
    ("older", "multiprocessing", "lora", "transports"),
    [
        pytest.param(False, "0", "on", ("inprocess",), marks=shown(*ways("in-process LLM", *MODES))),
        pytest.param(
            *(False, "1", "off", ("shm", "inline")),
            marks=[pytest.mark.long_run, *shown(*ways("multiprocess LLM", "full"))],
        ),
        pytest.param(
            *(True, "0", "on", ("inprocess",)),
            marks=shown(*ways("in-process LLM", *MODES, version=OLDER)),
        ),
    ],
    ids=["0.32-lora", "0.32", "0.27.1-lora"],
)
def test_an_engine_handle_is_synced_in_place(
    vllm_python: Path,
    request: pytest.FixtureRequest,
    tiny_folder: Path,
    tmp_path: Path,
    older: bool,
    multiprocessing: str,
    lora: str,
    transports: tuple[str, ...],
) -> None:
    environment = {
        **os.environ,
        **front_environment(FrontStart(str(tiny_folder), "", "cpu")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
    }
    if older:
        before = str(request.getfixturevalue("vllm_older"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (before, os.environ.get("PYTHONPATH"))))
    finished = subprocess.run(
        [str(vllm_python), str(PROGRAM), str(tiny_folder), str(tmp_path / "answer"), lora, *transports],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    seen = json.loads((tmp_path / "answer").read_text())
    assert seen["alive"]
    assert [(sync["transport"], sync["version"]) for sync in seen["syncs"]] == [
        (transport, version) for transport in transports for version in (1, 2, 3)
    ]
    for sync in seen["syncs"]:
        assert sync["era"] == ("base-layer-names" if older else "lora-load-weights")
        assert sync["coverage"] == "proven"
        assert sync["moved"]
        assert sync["same_tokens"]
        assert sync["distance"] <= 1e-4
    assert seen["prefixes"]["emptied"] <= 1e-4
    assert seen["prefixes"]["kept"] >= 1e-2, (
        "the control: what old weights cached shows where it is not emptied"
    )
    if lora == "on":
        assert seen["syncs"][-1]["unchanged"], "a sync of the same weights changes no bit"
        assert seen["adapters"]["unchanged"] == {"said": True, "base": True}
        refused = "ValueError: There is no module or parameter named 'embed_tokens.weight'" if older else ""
        assert seen["adapters"]["plain_names"].startswith(refused)
        assert bool(seen["adapters"]["plain_names"]) is older, "plain names are right since 0.28 alone"
        adapters_are_the_trainers(seen["adapters"], older=older)
        nothing_old_is_met(seen["adapters"]["beside"], older=older)


def adapters_are_the_trainers(seen: dict[str, Any], *, older: bool) -> None:
    for swap in ("two_slot", "paused"):
        for number, sync in enumerate(seen[swap]):
            the_adapter_arrived(sync)
            assert sync["version"] == number + 1
            # Full syncs came before, so that the first lane finds another base.
            first = number == 0 and swap == "two_slot"
            assert sync["phases"] == (["base", "adapter"] if first else ["adapter"])
            assert sync["base_unchanged"] is not first
        wrong = seen[f"{swap}-wrong"]
        assert "its scale is 2, but the engine applies" in wrong["folded_twice"]["error"]
        assert "it bound to 7 of 14 modules" in wrong["half"]["error"]
        assert wrong["folded_twice"]["symptom"] >= 1e-2
        assert wrong["half"]["symptom"] >= 1e-2
        assert wrong["afterwards"] <= 1e-4
    failed = seen["failed"]
    assert "in the middle" in failed["error"]
    assert (failed["same_name"], failed["held"]) == (True, 1)
    assert failed["old_serves"] <= 1e-4
    the_adapter_arrived(failed["next"])
    assert seen["dropped"]["held"] == 0
    assert seen["dropped"]["distance"] <= 1e-4
    for sync in seen["merged"]:
        assert sync["moved"]
        assert sync["distance"] <= 1e-4
        assert sync["held"] == 0, "a base that came takes adapters away"
    the_adapter_arrived(seen["patterns"])
    assert seen["patterns"]["form"] == ("normal" if older else "as-trained")


def the_adapter_arrived(sync: dict[str, Any]) -> None:
    assert sync["moved"]
    assert sync["distance"] <= 1e-4
    assert sync["through_us"] <= 1e-4
    assert sync["held"] == 1


def nothing_old_is_met(seen: dict[str, Any], *, older: bool) -> None:
    """Whatever the owner of the engine does beside a lane."""
    assert seen["old_serves"] <= 1e-4
    assert seen["published_again"] <= 1e-4, "no prefix of the adapter that had the name before"
    assert bool(seen["reload"]) is older, "with LoRA on, 0.27.1 cannot, and stops half-way"
    assert seen["phases"] == ["base", "adapter"]
    assert seen["after_the_reload"] <= 1e-4
    assert "default@1 is not served any more" in seen["gone"]
    assert seen["then"] <= 1e-4, "the engine goes on"
