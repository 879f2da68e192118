from __future__ import annotations

import shlex
from typing import Literal

import pytest

from weightlane.contexts import LaunchContext
from weightlane.errors import PlanError
from weightlane.facts import EngineFacts
from weightlane.types import Mode
from weightlane_vllm import server
from weightlane_vllm.general_plugin import FRONT_ADDRESS
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
    descriptor, *_ = weightlane_register_backends()
    facts = EngineFacts(engine="vllm", version="0.32.0", source="installed", device="cpu")
    plan = plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/model", tensor_parallel=2))
    (note,) = (note for note in plan.notes if "worker_extension_cls=" in note)
    assert "'weightlane_vllm.worker_extension.WeightlaneWorkerExtension'" in note
    assert "VLLM_CPU_OMP_THREADS_BIND" in plan.environment
    assert any("float32" in note for note in plan.notes)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("gpu", "auto")])
def test_the_launch_plan_is_what_the_demo_and_the_live_tests_start(
    device: Literal["cpu", "gpu"], dtype: str
) -> None:
    descriptor, *_ = weightlane_register_backends()
    facts = EngineFacts(engine="vllm", version="0.32.0", source="installed", device=device)
    context = LaunchContext(
        descriptor, facts, Mode.FULL, "/model", tensor_parallel=2, address="unix:/run/mine/s"
    )
    plan = plan_launch(context)
    start = FrontStart("/model", "unix:/run/mine/s", device, 2, dtype=dtype, model_length=None)
    assert ("/env/python", *plan.arguments) == front_command(start, python="/env/python")
    assert plan.environment == front_environment(start)
    assert plan.arguments[:2] == ("-m", server.__name__)
    understood = server._parser().parse_args(plan.arguments[2:])
    assert (understood.model, understood.address, understood.tensor_parallel_size, understood.dtype) == (
        "/model",
        plan.address,
        2,
        dtype,
    )
    assert understood.max_model_len is None


def test_the_launch_plan_refuses_an_address_where_no_front_can_listen() -> None:
    descriptor, *_ = weightlane_register_backends()
    facts = EngineFacts(engine="vllm", version="0.32.0", source="installed")
    for address in ("http://127.0.0.1:8000", "tcp:10.0.0.1:7000", "unix:relative"):
        with pytest.raises(PlanError, match="address"):
            plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/model", address=address))
    assert plan_launch(LaunchContext(descriptor, facts, Mode.FULL, "/model")).address.startswith("unix:/")


@pytest.mark.parametrize(
    ("device", "command"),
    [
        ("gpu", ["vllm", "serve"]),
        (
            "cpu",
            ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"],
        ),  # its `vllm` does not start
    ],
)
def test_the_launch_plan_tells_how_the_openai_server_is_started_instead(
    device: Literal["cpu", "gpu"], command: list[str]
) -> None:
    descriptor, *_ = weightlane_register_backends()
    facts = EngineFacts(engine="vllm", version="0.32.0", source="installed", device=device)
    context = LaunchContext(
        descriptor, facts, Mode.ADAPTER, "/a model", 2, address="unix:/run/mine/s", lora_rank=8
    )
    plan = plan_launch(context)
    (note,) = (note for note in plan.notes if "OpenAI server" in note)
    words = shlex.split(note.partition(": ")[2])
    assert f"{FRONT_ADDRESS}=unix:/run/mine/s" in words
    at = words.index(command[0])
    assert words[at : words.index("--tensor-parallel-size")] == [*command, "/a model"]
    assert words[words.index("--tensor-parallel-size") :] == list(
        plan.arguments[plan.arguments.index("--tensor-parallel-size") :]
    )
