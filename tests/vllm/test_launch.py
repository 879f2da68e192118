from __future__ import annotations

from typing import Literal

import pytest

from weightlane.contexts import LaunchContext
from weightlane.facts import EngineFacts
from weightlane.types import Mode
from weightlane_vllm.launch import FrontStart, cpu_binding, front_command, front_environment, plan_launch
from weightlane_vllm.plugin import weightlane_register_backends

_DEVICES: tuple[Literal["cpu", "gpu"], ...] = ("cpu", "gpu")


@pytest.mark.parametrize(
    ("cpus", "workers", "binding"),
    [
        ((0, 1), 2, "0|1"),
        ((4, 5, 6, 7), 2, "4,5|6,7"),
        ((0, 1, 2), 2, "0|1"),
        ((3,), 2, "3|3"),
        ((0, 1), 1, "0,1"),
    ],
)
def test_cores_are_shared_out_among_workers(cpus: tuple[int, ...], workers: int, binding: str) -> None:
    assert cpu_binding(cpus, workers) == binding


def test_a_cpu_start_binds_cores_at_tensor_parallel_only() -> None:
    start = FrontStart("/model", "unix:/run/s", "cpu", tensor_parallel=2, cpus=(0, 1))
    environment = front_environment(start)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in front_environment(FrontStart("/model", "unix:/run/s", "cpu"))


def test_a_gpu_start_has_no_cpu_settings() -> None:
    environment = front_environment(FrontStart("/model", "unix:/run/s", "gpu", tensor_parallel=2))
    assert not [name for name in environment if "CPU" in name or "CUDA" in name]


def test_the_device_is_never_left_to_a_default() -> None:
    with pytest.raises(TypeError, match="device"):
        FrontStart(model="/model", address="unix:/run/s")  # type: ignore[call-arg]


def test_nothing_allows_insecure_serialization() -> None:
    for device in _DEVICES:
        environment = front_environment(FrontStart("/model", "unix:/run/s", device))
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment


def test_the_command_is_a_list_for_the_given_interpreter() -> None:
    command = front_command(
        FrontStart("/a model", "unix:/run/s", "cpu", tensor_parallel=2), python="/env/bin/python"
    )
    assert command[:3] == ("/env/bin/python", "-m", "weightlane_vllm.server")
    assert "/a model" in command
    assert command[command.index("--tensor-parallel-size") + 1] == "2"


def test_the_launch_plan_names_the_worker_extension() -> None:
    (descriptor,) = weightlane_register_backends()
    facts = EngineFacts(engine="vllm", version="0.32.0", source="installed", device="cpu")
    plan = plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/model", tensor_parallel=2))
    given = plan.arguments[plan.arguments.index("--worker-extension-cls") + 1]
    module, _, name = given.rpartition(".")
    assert module == "weightlane_vllm.worker_extension"
    assert name == "WeightlaneWorkerExtension"
    assert "VLLM_CPU_OMP_THREADS_BIND" in plan.environment
    assert any("float32" in note for note in plan.notes)
