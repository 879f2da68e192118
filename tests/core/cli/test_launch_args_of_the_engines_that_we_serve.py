"""`launch-args` over our own backends and every mode: a plan with the right arguments, or the modes it has.

No engine is needed: its version is stated. When a backend learns a mode, this table says so, and with which
arguments its engine is then started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from weightlane.front.socket_folder import RUNTIME_VARIABLE
from weightlane.reference import server
from weightlane.registry import get_registry
from weightlane.types import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Run

VERSIONS = {"reference": "4.57.0", "vllm": "0.32.0", "sglang": "0.5.18"}
ARGUMENTS = {
    "reference": [
        *("-m", "weightlane.reference.server", "--model", "$MODEL"),
        *("--address", "unix:/run/me/weightlane/reference.sock", "--device", "cuda"),
    ],
    "vllm": [
        *("-m", "weightlane_vllm.server", "--model", "$MODEL"),
        *("--address", "unix:/run/me/weightlane/vllm.sock"),
        *("--tensor-parallel-size", "1", "--dtype", "auto", "--max-num-seqs", "8"),
    ],
    "sglang": [
        *("-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", "30000"),
        *("--model-path", "$MODEL", "--tp", "1"),
    ],
}

FOR_ADAPTERS = {
    "reference": ["--adapter-slots", "2"],
    "vllm": ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"],
    "sglang": [
        *("--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all"),
        *("--max-loras-per-batch", "3"),
    ],
}


@pytest.fixture(autouse=True)
def stated_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, "/run/me")
    monkeypatch.setattr("weightlane.cli.launching.is_taken", lambda address: False)  # whatever runs here
    for engine, version in VERSIONS.items():
        monkeypatch.setenv(f"WEIGHTLANE_ASSUME_{engine.upper()}_VERSION", version)


@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
@pytest.mark.parametrize("engine", VERSIONS)
def test_every_mode_is_planned(run: Callable[..., Run], engine: str, mode: str) -> None:
    done = run("launch-args", engine, "--mode", mode, "--device", "gpu", "--json")
    assert (done.status, done.document["mode"]) == (0, mode)
    slots = FOR_ADAPTERS[engine] if mode == "adapter" else []
    assert done.document["command"][1:] == [*ARGUMENTS[engine], *slots]
    assert done.document["engine_version"] == VERSIONS[engine]


def test_a_mode_that_a_version_cannot_receive_is_refused_with_those_it_can(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLANE_ASSUME_SGLANG_VERSION", "0.5.4")
    assert run("launch-args", "sglang", "--mode", "full", "--device", "gpu", "--json").status == 0
    done = run("launch-args", "sglang", "--mode", "adapter", "--device", "gpu", "--json")
    error = done.document["error"]
    assert (done.status, error["type"]) == (1, "SelectionError")
    assert error["what"].endswith("cannot receive mode adapter.")
    assert error["why"] == "It can receive: full, merged."
    assert error["fix"].startswith("Use --mode full")


def test_the_reference_engine_that_is_printed_for_mode_adapter_is_one_that_takes_adapters(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the slots that the lane's swap needs, which finds in the plan's backend all else it asks for."""
    started: list[Any] = []

    class FakeEngine:
        def __init__(self, model: str, *, dtype: str, device: str, adapter_slots: int) -> None:
            started.append((model, dtype, device, adapter_slots))

    monkeypatch.setattr("weightlane.reference.engine.ReferenceEngine", FakeEngine)
    monkeypatch.setattr("weightlane.front.server.serve_front", lambda engine, at: started.append(at))
    document = run("launch-args", "reference", "--mode", "adapter", "--device", "cpu", "--json").document
    arguments = document["command"][1:]
    assert arguments[:2] == ["-m", "weightlane.reference.server"]
    assert server.main(arguments[2:]) == 0
    assert started == [("$MODEL", "float32", "cpu", 2), document["address"]]
    backend = get_registry().backend_named(document["backend"])
    assert backend is not None
    assert {"receive-adapter", "worker-agent"} <= {item.value for item in backend.descriptor.capabilities}
    for hook in ("open_endpoint", "express_adapter", "map_names", "build_requests", "worker_agent"):
        assert get_registry().implements(backend, f"weightlane_{hook}")


def test_a_rank_is_rounded_up_for_vllm_and_means_nothing_in_other_modes(run: Callable[..., Run]) -> None:
    words = ("launch-args", "vllm", "--device", "gpu", "--lora-rank", "20", "--json")
    command = run(*words, "--mode", "adapter", "--swap", "paused").document["command"]
    assert command[-5:] == ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "32"]
    refused = run(*words)
    assert refused.status == 2
    assert "it has a meaning with --mode adapter alone" in " ".join((refused.out + refused.err).split())


@pytest.mark.parametrize(
    ("engine", "other"),
    [
        ("reference", "unix:/run/me/weightlane/reference-2.sock"),
        ("vllm", "unix:/run/me/weightlane/vllm-2.sock"),
        ("sglang", "http://127.0.0.1:30001"),
    ],
)
def test_the_note_on_a_second_replica_gives_an_address_that_can_be_used(
    run: Callable[..., Run], engine: str, other: str
) -> None:
    words = ("launch-args", engine, "--device", "gpu", "--json")
    first = run(*words).document
    note = f"A second replica on this host needs an address of its own: such as --address {other}."
    assert note in first["notes"]
    second = run(*words, "--address", other).document
    assert second["address"] == other != first["address"]
    assert not any("second replica" in text for text in second["notes"])


@pytest.mark.parametrize(
    ("engine", "added"),
    [("reference", []), ("vllm", ["--enable-sleep-mode"]), ("sglang", ["--enable-memory-saver"])],
)
def test_an_engine_whose_memory_a_lane_will_let_go_is_started_for_it(
    run: Callable[..., Run], engine: str, added: list[str]
) -> None:
    words = ("--release", "kv_cache", "--release", "weights", "--device", "gpu", "--json")
    done = run("launch-args", engine, *words)
    assert (done.status, done.document["command"][1:]) == (0, [*ARGUMENTS[engine], *added])


def test_an_engine_that_cannot_let_memory_go_is_refused_before_it_is_started(run: Callable[..., Run]) -> None:
    done = run("launch-args", "vllm", "--release", "kv_cache", "--device", "cpu", "--json")
    assert (done.status, done.document["error"]["type"]) == (1, "PlanError")
    assert "on a CPU build frees nothing" in str(done.document["error"])


def test_an_engine_that_frees_nothing_on_a_cpu_says_so_and_starts(run: Callable[..., Run]) -> None:
    words = ("launch-args", "sglang", "--device", "cpu", "--json")
    plain, released = run(*words).document, run(*words, "--release", "kv_cache").document
    assert released["command"] == plain["command"]
    assert set(released["notes"]) - set(plain["notes"]) == {
        "On a CPU SGLang keeps track of what is released, and frees nothing."
    }
