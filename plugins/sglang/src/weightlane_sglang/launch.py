"""Starting a server: arguments, environment, and a context manager that ends it with all its children.

The server runs in an environment of its own, which holds SGLang; this process needs none of it.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

from weightlane.contexts import LaunchContext, LaunchPlan
from weightlane.errors import EngineDeadError, EngineError, PlanError, Problem
from weightlane.installations import find_distribution
from weightlane.interrupts import interrupts_held
from weightlane.types import Mode
from weightlane_sglang.adapter_launch import lora_arguments, lora_notes
from weightlane_sglang.contract import ENCODER_CACHE_VARIABLE, MODEL_INFO_ROUTE
from weightlane_sglang.http_channel import HttpChannel
from weightlane_sglang.installed import LOADER_QUESTION
from weightlane_sglang.loader_name import LOADER_ARGUMENTS, PLUGIN_DISTRIBUTION
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Device: TypeAlias = Literal["cpu", "gpu"]

_LOOPBACK = "127.0.0.1"
_PROPOSED_ADDRESS = f"http://{_LOOPBACK}:30000"
_LAST_LOG_LINES = 25
_PORTS = range(20000, 32768)
"""Below those of outgoing connections, one of which could take it before the server does. SGLang 0.5.12 also
dies at its start where the port 10000 above its own is none (its gRPC port, used or not)."""
_POLL_SECONDS = 0.25
_END_SECONDS = 5.0

_NO_CPU_KERNELS = (
    "It was started for CPU, for which SGLang's own packages hold no kernels: use an environment that lets "
    "it import without them, as tests/live/sglang_cpu_environment of the weightlane repository does, or a "
    "machine with a GPU."
)

_CPU_NOTE = (
    "The settings for CPU are for trying things out: float32, sequences of 256 tokens at most, four at a "
    "time. SGLang's own packages hold no kernels for CPU."
)
_NO_LOADER_NOTE = (
    "Without weightlane-sglang in the server's environment nothing looks into it: coverage is untraced. "
    "Install it there (pip install weightlane-sglang) and ask again."
)
_LOADER_NOTE = (
    "Code of weightlane in the server tells where weights land. It answers in a folder of this user on this "
    f"host; {RUN_FOLDER_VARIABLE} names another one, to server and trainer alike."
)
_PORT_NOTE = "Whoever can reach its port can run code in it: keep it on loopback or a trusted network."

_RELEASE_NOTE = (
    "Weights that are released are lost until the next sync; --enable-weights-cpu-backup keeps a copy on the "
    "host. The memory saver is the package torch_memory_saver, in the server's environment."
)
_CPU_RELEASE_NOTE = "On a CPU SGLang keeps track of what is released, and frees nothing."

_EVERYWHERE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", ENCODER_CACHE_VARIABLE: "0"}
_CPU_ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "2048", "--max-running-requests", "4", "--context-length", "256"),
    *("--mem-fraction-static", "0.3", "--disable-overlap-schedule", "--disable-cuda-graph"),
    "--sleep-on-idle",  # a waiting scheduler would otherwise keep a core busy
    # generation starts when we ask for it, with token ids
    *("--skip-server-warmup", "--skip-tokenizer-init"),
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to start one server.

    `python` is the interpreter of the environment that holds SGLang, `model` a checkpoint folder. The CPU
    settings hide every GPU and serve a small model in fp32 for trying things out; on a GPU SGLang's own
    defaults stand.
    """

    python: Path
    model: Path
    device: Device
    tensor_parallel: int = 1
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has answered. `process_id` leads a process group that holds all of its processes."""

    url: str
    process_id: int
    log: Path


def server_arguments(model: str, *, tensor_parallel: int, device: Device) -> tuple[str, ...]:
    """Arguments of `sglang.launch_server`, without its address."""
    arguments = ("--model-path", model, "--tp", str(tensor_parallel))
    return (*arguments, *_CPU_ARGUMENTS) if device == "cpu" else arguments


def launch_arguments(
    model: str, *, host: str, port: int, tensor_parallel: int, device: Device
) -> tuple[str, ...]:
    """All that the interpreter of the engine's environment is given."""
    server = ("-m", "sglang.launch_server", "--host", host, "--port", str(port))
    return (*server, *server_arguments(model, tensor_parallel=tensor_parallel, device=device))


def server_environment(*, tensor_parallel: int, device: Device) -> dict[str, str]:
    """Environment variables to add for the server. Of encoders it keeps nothing: no flush would empty it."""
    if device == "gpu":
        return dict(_EVERYWHERE)
    cores = os.cpu_count() or 1
    added = {
        **_EVERYWHERE,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(max(1, cores // tensor_parallel)),
    }
    if tensor_parallel > 1:
        added["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_core_shares(cores, tensor_parallel))
    return added


def loader_arguments(search_path: Sequence[str]) -> tuple[str, ...]:
    """The argument by which our code enters a server of this environment, where it holds that code.

    SGLang dies at the first request for a loader that it cannot import, so it is never named on a guess.
    """
    return LOADER_ARGUMENTS if find_distribution((PLUGIN_DISTRIBUTION,), search_path) is not None else ()


def plan_launch(context: LaunchContext) -> LaunchPlan:
    """A server of SGLang's own that a lane can reach by requests.

    Where its environment holds this plugin, the server is told to let our code in, so that loads can be
    traced.

    Raises:
        PlanError: its address is no `http://HOST:PORT`.
    """
    device: Device = "cpu" if context.facts.device == "cpu" else "gpu"
    address = context.address or _PROPOSED_ADDRESS
    host, port = _host_and_port(address)
    arguments = launch_arguments(
        context.model, host=host, port=port, tensor_parallel=context.tensor_parallel, device=device
    )
    if context.release and device == "gpu":
        arguments = (*arguments, "--enable-memory-saver")
    environment = server_environment(tensor_parallel=context.tensor_parallel, device=device)
    adapters = context.mode is Mode.ADAPTER
    if adapters:
        arguments = (*arguments, *lora_arguments(context.lora_rank, context.swap, device=device))
    enters = context.facts.attributes.get(LOADER_QUESTION, False)
    if enters and RUN_FOLDER_VARIABLE in os.environ:
        environment[RUN_FOLDER_VARIABLE] = os.environ[RUN_FOLDER_VARIABLE]
    notes = [
        *(lora_notes(context.lora_rank, context.swap) if adapters else ()),
        _LOADER_NOTE if enters else _NO_LOADER_NOTE,
        _PORT_NOTE,
    ]
    if context.release:
        notes.append(_CPU_RELEASE_NOTE if device == "cpu" else _RELEASE_NOTE)
    return LaunchPlan(
        arguments=(*arguments, *LOADER_ARGUMENTS) if enters else arguments,
        environment=environment,
        notes=(_CPU_NOTE, *notes) if device == "cpu" else tuple(notes),
        address=address,
        requires=(PLUGIN_DISTRIBUTION,) if enters else (),
    )


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    else:
        if parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username:
            host = None
    if not host or not port:
        what = "is not where an SGLang server listens"
        raise PlanError([Problem("address", address, what, f"Give http://HOST:PORT: {_PROPOSED_ADDRESS}.")])
    return host, port


@contextmanager
def launched_server(
    settings: ServerSettings, *, log: Path | None = None, ready_within_seconds: float = 600.0
) -> Iterator[RunningServer]:
    """A server on a free loopback port, ready when the block starts, gone with every child when it ends.

    Args:
        settings: what to start.
        log: file for the server's output, made anew with mode 0600; by default a temporary one, which is
            removed when the block ends without an error.
        ready_within_seconds: bound on the start.

    Raises:
        EngineDeadError: the server ended before it was ready; its last log lines are in the message.
        EngineError: it was not ready in time.
    """
    if not settings.python.exists():
        raise EngineError(
            f"{settings.python} does not exist.",
            "",
            "Name the interpreter of an environment that has SGLang.",
        )
    kept = log is not None
    descriptor, path = _open_log(log)
    port = _free_port()
    arguments = launch_arguments(
        str(settings.model.resolve()),
        host=_LOOPBACK,
        port=port,
        tensor_parallel=settings.tensor_parallel,
        device=settings.device,
    )
    command = [str(settings.python), *arguments, *settings.arguments]
    environment = {
        # Ours says where this process imports from; the server has an environment of its own.
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **server_environment(tensor_parallel=settings.tensor_parallel, device=settings.device),
        **settings.environment,
    }
    with ExitStack() as stack:
        with interrupts_held():
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=descriptor,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            finally:
                os.close(descriptor)
            stack.callback(_end_group, process)
        url = f"http://{_LOOPBACK}:{port}"
        _wait_ready(process, url, path, settings.device, ready_within_seconds)
        yield RunningServer(url=url, process_id=process.pid, log=path)
    if not kept:
        path.unlink(missing_ok=True)


def last_lines(log: Path, count: int = _LAST_LOG_LINES) -> str:
    """The end of a log, without the lines that SGLang's libraries print while they die."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    telling = [
        line[:400] for line in lines if line.strip() and "leaked" not in line and "nanobind" not in line
    ]
    return "\n".join(telling[-count:])


def _wait_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, device: Device, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    with HttpChannel(url) as channel:
        while True:
            status = process.poll()
            if status is not None:
                raise EngineDeadError(
                    f"SGLang ended with status {status} before it was ready.",
                    f"The end of its log, {log}:\n{last_lines(log)}",
                    f"\n{_NO_CPU_KERNELS}" if device == "cpu" else "",
                )
            try:
                channel.get(MODEL_INFO_ROUTE, timeout_seconds=2.0)
            except EngineError as error:
                if time.monotonic() >= deadline:
                    raise EngineError(
                        f"SGLang was not ready within {seconds:.0f} s ({error.what})",
                        f"The end of its log, {log}:\n{last_lines(log)}",
                    ) from error
                time.sleep(_POLL_SECONDS)
            else:
                return


def _open_log(log: Path | None) -> tuple[int, Path]:
    if log is None:
        descriptor, name = tempfile.mkstemp(prefix="weightlane-sglang-", suffix=".log")  # mode 0600
        return descriptor, Path(name)
    log.unlink(missing_ok=True)
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), log


def _free_port() -> int:
    """One of `_PORTS` that nobody listens on, by chance: servers that start at once get different ones."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port
    raise EngineError(f"No port from {_PORTS.start} to {_PORTS.stop - 1} is free on {_LOOPBACK}.")


def _core_shares(cores: int, shares: int) -> Iterator[str]:
    """Ranges of cores, such as `0-3`, one for each of `shares` ranks; ranks double up on a small machine."""
    each = max(1, cores // shares)
    for share in range(shares):
        first = share * each % cores
        yield str(first) if each == 1 else f"{first}-{first + each - 1}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends every process of the server's own group: asked first, then killed; reaps the leader."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.05)
    process.wait(timeout=_END_SECONDS)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a leader that is not reaped would keep its group alive
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True
