"""How vLLM is started so that a lane can reach it: the arguments, and what a CPU build needs besides."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightlane.contexts import LaunchPlan
from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.contexts import LaunchContext


_HOW_TO_START = (
    "Behind a front: python -m weightlane_vllm.server --model DIR --address unix:/PATH; "
    "in your own process: vllm.LLM(...) with the same arguments, passed as rollout('vllm', engine=llm)."
)


@dataclass(frozen=True, slots=True)
class FrontStart:
    """One engine behind a front.

    `device` "cpu" hides every GPU from the engine. `dtype` "auto" is the checkpoint's; a CPU build takes
    float32 alone with this plugin. `model_length` bounds prompt plus continuation, in
    tokens. `cpus` are the cores that a CPU engine may use, shared out evenly among its workers; empty means
    all that this process may use.
    """

    model: str
    address: str
    device: Literal["cpu", "gpu"]
    tensor_parallel: int = 1
    dtype: str = "float32"
    model_length: int = 256
    sequences: int = 8
    cpus: tuple[int, ...] = ()


def front_command(start: FrontStart, *, python: str) -> tuple[str, ...]:
    """The command that starts this engine in the environment of interpreter `python`."""
    return (
        python,
        "-m",
        "weightlane_vllm.server",
        "--model",
        start.model,
        "--address",
        start.address,
        "--tensor-parallel-size",
        str(start.tensor_parallel),
        "--dtype",
        start.dtype,
        "--max-model-len",
        str(start.model_length),
        "--max-num-seqs",
        str(start.sequences),
    )


def front_environment(start: FrontStart) -> Mapping[str, str]:
    """Variables for that command: offline, quiet, and for a CPU build its cache size and its cores."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if start.device == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if start.tensor_parallel > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding(
                start.cpus or usable_cpus(), start.tensor_parallel
            )
    return environment


def usable_cpus() -> tuple[int, ...]:
    """The cores this process may run on, in order."""
    if platform.system() == "Linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_binding(cpus: Sequence[int], workers: int) -> str:
    """vLLM's own notation: one list of cores a worker, `0,1|2,3`. Cores are reused when there are too few."""
    if len(cpus) < workers:
        return "|".join(str(cpus[worker % len(cpus)]) for worker in range(workers))
    share = len(cpus) // workers
    lists = (cpus[worker * share : (worker + 1) * share] for worker in range(workers))
    return "|".join(",".join(str(cpu) for cpu in part) for part in lists)


def plan_launch(context: LaunchContext) -> LaunchPlan:
    """Arguments for somebody who starts vLLM by other means than our server."""
    arguments = (
        "--model",
        context.model,
        "--tensor-parallel-size",
        str(context.tensor_parallel),
        "--worker-extension-cls",
        WORKER_EXTENSION_CLASS,
    )
    notes = [_HOW_TO_START]
    environment: dict[str, str] = {}
    if context.facts.device == "cpu":
        notes.append(
            "On a CPU build use dtype float32; the worker extension keeps linear weights unpacked there."
        )
        if context.tensor_parallel > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding(usable_cpus(), context.tensor_parallel)
    return LaunchPlan(arguments, environment, tuple(notes))
