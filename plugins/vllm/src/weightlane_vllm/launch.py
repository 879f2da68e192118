"""How vLLM is started so that a lane can reach it: arguments, environment, and what a CPU build needs."""

from __future__ import annotations

import os
import platform
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightlane.adapters import SLOTS_NEEDED
from weightlane.contexts import LaunchPlan
from weightlane.errors import PlanError, Problem
from weightlane.front.address import address_problems
from weightlane.front.socket_folder import proposed_address
from weightlane.types import Mode
from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS
from weightlane_vllm.general_plugin import FRONT_ADDRESS
from weightlane_vllm.lora_rank import DEFAULT_RANK, max_lora_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.contexts import LaunchContext
    from weightlane.types import MemoryTag

_OWN_PROCESS = (
    f"In a process of your own instead: vllm.LLM(..., worker_extension_cls={WORKER_EXTENSION_CLASS!r}), "
    "which a lane takes as rollout('vllm', engine=llm)."
)
_SEQUENCES = "At most {count} sequences are generated at a time; --max-num-seqs changes that."
_CPU_BUILD = (
    "On a CPU build the plugin takes dtype float32 alone, and its worker extension keeps linear weights "
    "unpacked; VLLM_CPU_KVCACHE_SPACE is the memory for keys and values in GiB, and --max-model-len bounds "
    "what one sequence may need of it."
)


@dataclass(frozen=True, slots=True)
class LoraStart:
    """LoRA on: how many adapters can be used at once, and the largest rank, which is one that vLLM allows."""

    slots: int
    rank: int


@dataclass(frozen=True, slots=True)
class FrontStart:
    """One engine behind a front.

    `device` "cpu" hides every GPU from the engine. `dtype` "auto" is the checkpoint's; a CPU build takes
    float32 alone with this plugin. `model_length` bounds prompt plus continuation, in tokens; None leaves it
    to the model's own. `cpus` are the cores that a CPU engine may use, shared out evenly among its workers;
    empty means all that this process may use. `lora` is None with LoRA off. `release` is memory that is to be
    let go and taken back: vLLM has to be told at its start, in one word for all of it.
    """

    model: str
    address: str
    device: Literal["cpu", "gpu"]
    tensor_parallel: int = 1
    dtype: str = "float32"
    model_length: int | None = 256
    sequences: int = 8
    cpus: tuple[int, ...] = ()
    lora: LoraStart | None = None
    release: tuple[MemoryTag, ...] = ()


def front_command(start: FrontStart, *, python: str) -> tuple[str, ...]:
    """The command that starts this engine in the environment of interpreter `python`."""
    return (python, *front_arguments(start))


def front_arguments(start: FrontStart) -> tuple[str, ...]:
    """What the interpreter of the engine's environment is given."""
    return (
        "-m",
        "weightlane_vllm.server",
        "--model",
        start.model,
        "--address",
        start.address,
        *_engine_arguments(start),
    )


def serve_command(start: FrontStart, *, python: str = "python") -> tuple[str, ...]:
    """The command that starts the same engine as vLLM's OpenAI server, in `serve_environment`.

    The command `vllm` of the CPU wheel asks for the version of a distribution `vllm`, which it is not, and
    ends; its server starts as a module.
    """
    if start.device == "cpu":
        module = "vllm.entrypoints.openai.api_server"
        return (python, "-m", module, "--model", start.model, *_engine_arguments(start))
    return ("vllm", "serve", start.model, *_engine_arguments(start))


def serve_environment(start: FrontStart) -> Mapping[str, str]:
    """Variables for that: those of `front_environment`, and the one that has a front opened beside it."""
    return {**front_environment(start), FRONT_ADDRESS: start.address}


def _engine_arguments(start: FrontStart) -> tuple[str, ...]:
    """In words that vLLM's own command line and our server's have in common."""
    length = () if start.model_length is None else ("--max-model-len", str(start.model_length))
    return (
        "--tensor-parallel-size",
        str(start.tensor_parallel),
        "--dtype",
        start.dtype,
        *length,
        "--max-num-seqs",
        str(start.sequences),
        *_lora_arguments(start.lora),
        *(("--enable-sleep-mode",) if start.release else ()),
    )


def _lora_arguments(lora: LoraStart | None) -> tuple[str, ...]:
    if lora is None:
        return ()
    return ("--enable-lora", "--max-loras", str(lora.slots), "--max-lora-rank", str(lora.rank))


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
    """A multiprocess `LLM` behind a front, in the checkpoint's own dtype, on CPU in float32.

    Raises:
        PlanError: no front can listen on the address, vLLM takes no adapter of this rank, or memory is to be
            let go on a CPU.
    """
    address = context.address or proposed_address(context.descriptor.engine)
    problems = address_problems(address)
    lora: LoraStart | None = None
    if context.mode is Mode.ADAPTER:
        try:
            rank = max_lora_rank(context.lora_rank or DEFAULT_RANK)
        except PlanError as refusal:
            problems = [*problems, *refusal.problems]
        else:
            lora = LoraStart(SLOTS_NEEDED[context.swap], rank)
    on_cpu = context.facts.device == "cpu"
    if on_cpu and context.release:
        what = "vLLM's sleep on a CPU build frees nothing, and it does not start with --enable-sleep-mode"
        fix = "Leave it out, or start it on a GPU."
        problems = [*problems, *(Problem("release", tag, what, fix) for tag in context.release)]
    if problems:
        raise PlanError(problems)
    start = FrontStart(
        model=context.model,
        address=address,
        device="cpu" if on_cpu else "gpu",
        tensor_parallel=context.tensor_parallel,
        dtype="float32" if on_cpu else "auto",
        model_length=None,
        lora=lora,
        release=context.release,
    )
    notes = (
        _serve_note(start),
        *_lora_notes(context, lora),
        _SEQUENCES.format(count=start.sequences),
        _OWN_PROCESS,
        *_sleep_notes(context.release),
    )
    return LaunchPlan(
        arguments=front_arguments(start),
        environment=front_environment(start),
        notes=(_CPU_BUILD, *notes) if on_cpu else notes,
        address=address,
        requires=("weightlane-vllm",),
    )


def _serve_note(start: FrontStart) -> str:
    words = ("env", *(f"{name}={value}" for name, value in serve_environment(start).items()))
    command = shlex.join((*words, *serve_command(start))).replace("'$MODEL'", '"$MODEL"')
    return f"As vLLM's OpenAI server instead, in the same environment: {command}"


def _sleep_notes(release: Sequence[MemoryTag]) -> tuple[str, ...]:
    return ("In your own process also: enable_sleep_mode=True.",) if release else ()


def _lora_notes(context: LaunchContext, lora: LoraStart | None) -> tuple[str, ...]:
    if lora is None:
        return ()
    told = (
        f"the smallest that vLLM allows for rank {context.lora_rank}"
        if context.lora_rank
        else "vLLM's own default, since no rank was told (--lora-rank)"
    )
    slots = f"{lora.slots} LoRA slot{'' if lora.slots == 1 else 's'}"
    return (
        f"{slots}: what one lane with swap {context.swap} needs. Largest rank {lora.rank}: {told}.",
        f"In your own process also: enable_lora=True, max_loras={lora.slots}, max_lora_rank={lora.rank}.",
    )
