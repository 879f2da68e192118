"""The plugin's answers to core, without vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from weightlane.contexts import RolloutTarget
from weightlane.errors import EngineError
from weightlane.facts import EngineFacts
from weightlane.types import Capability, Phase, TransportName
from weightlane_vllm import plugin
from weightlane_vllm.endpoint import open_endpoint
from weightlane_vllm.requests import FENCE_NOTE, build_program, plan_lifecycle

RECEIVED = frozenset(TransportName) - {TransportName.COLLECTIVE}
"""A group of processes is not joined by our agent yet."""


@pytest.mark.requirement("R87")
def test_one_backend_of_two_eras() -> None:
    descriptor, older = plugin.weightlane_register_backends()
    assert (older.name, older.engine, older.era) == ("vllm", "vllm", "base-layer-names")
    taken = older.versions.filter(["0.22.1", "0.23.0", "0.25.1", "0.27.1", "0.28.0", "0.32.0"])
    assert list(taken) == ["0.23.0", "0.25.1", "0.27.1"]
    assert descriptor.capabilities - older.capabilities == {Capability.WEIGHT_VERSION}
    assert (descriptor.name, descriptor.role, descriptor.engine) == ("vllm", "rollout", "vllm")
    assert descriptor.versions == SpecifierSet(">=0.28,<0.33")
    assert {"0.28.0", "0.32.0", "0.32.1rc1"} <= set(
        descriptor.versions.filter(["0.27.1", "0.28.0", "0.32.0", "0.32.1rc1", "0.33.0"], prereleases=True)
    )
    received = {Capability.RECEIVE_FULL, Capability.RECEIVE_MERGED}
    assert received | {Capability.WORKER_AGENT} <= descriptor.capabilities
    assert Capability.PAUSE not in descriptor.capabilities, "LLM has no pause; the fence is advisory"
    assert set(descriptor.transports) == RECEIVED


def test_the_plugin_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, weightlane_vllm.plugin as p; p.weightlane_register_backends(); "
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("transport", sorted(RECEIVED))
def test_the_agent_receives_over_every_transport(transport: TransportName) -> None:
    assert build_program(transport).move.transport == transport.value


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("phase", list(Phase))
def test_the_cache_is_reset_after_the_last_bucket_and_the_fence_is_called_advisory(phase: Phase) -> None:
    facts = EngineFacts(
        engine="vllm", version="0.32.0", source="worker", launch_arguments={"dtype": "bfloat16"}
    )
    lifecycle = plan_lifecycle(facts, phase)
    assert [call.route for call in lifecycle.settle] == ["reset_prefix_cache"]
    assert not lifecycle.pause
    assert not lifecycle.resume
    assert (FENCE_NOTE in lifecycle.notes) is (phase is not Phase.ADAPTER)
    assert any("bfloat16" in note for note in lifecycle.notes)


def test_an_http_server_is_refused_with_the_way_out() -> None:
    with pytest.raises(EngineError, match=r"weightlane_vllm\.server"):
        open_endpoint(RolloutTarget("vllm", address="http://127.0.0.1:8000"), 5.0)


def test_a_handle_that_is_no_llm_is_refused() -> None:
    with pytest.raises(EngineError, match=r"given a builtins\.dict"):
        open_endpoint(RolloutTarget("vllm", handle={}), 5.0)
