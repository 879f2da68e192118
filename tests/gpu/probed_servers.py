"""SGLang servers that start at the same time, each in a thread, and end together."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from probed_scheduler import LOADER
from probed_server import ProbedServer
from proof_ground import HERE, START_SECONDS
from proof_words import PROMPTS, TEXT

from weightlane_sglang.launch import Device, ServerSettings, launched_server
from weightlane_sglang.loader_name import LOADER_ARGUMENTS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_IN_SERVER = HERE.parent / "live" / "sglang" / "in_server"
_MOST = 6
_START_SECONDS = 200.0
_ON_A_GPU = (
    *("--dtype", "bfloat16", "--context-length", "512"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    # All of them are on one GPU: the fraction is of what is free as one starts, and the rest is a cap.
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "8192", "--max-running-requests", "8"),
    *("--disable-cuda-graph", "--disable-piecewise-cuda-graph"),
    *("--skip-tokenizer-init", "--skip-server-warmup"),
)
SAVER = "--enable-memory-saver"
_EVERYWHERE = (
    "--disable-radix-cache",  # else a text that comes twice is computed in another way, with other roundings
    *LOADER_ARGUMENTS,
    LOADER,
)


@dataclass(frozen=True)
class Started:
    """A server, and the seconds until it was ready and those of its first requests, which compile kernels."""

    server: ProbedServer
    start_seconds: float
    first_seconds: float


class Servers:
    """Those of one run.

    Args:
        options: of the program.
        scratch: for kernels that one server compiles and another takes.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options = options
        self._device: Device = "cpu" if options.device == "cpu" else "gpu"
        self._pool = ThreadPoolExecutor(_MOST)
        self._begun: dict[str, Future[Started]] = {}
        self._ends: list[ExitStack] = []
        self._kernels = scratch / "triton"

    def begin(self, name: str, model: Path, *more: str) -> None:
        """Starts one; it is asked once for each kind of answer as soon as it is ready."""
        self._begun[name] = self._pool.submit(self._start, name, model, more)

    def ready(self, name: str) -> Started:
        """Waits for it.

        Raises:
            EngineError: it did not start, in its own words, or failed at its first request.
        """
        return self._begun[name].result()

    def settle(self) -> None:
        """Waits until none is starting any more, so that the GPU's memory stands still; at most a minute."""
        wait(self._begun.values(), timeout=60.0)

    def close(self) -> None:
        """Ends all of them at the same time; one that still starts is waited for."""
        for begun in self._begun.values():
            begun.cancel()
        self._pool.shutdown()
        with ThreadPoolExecutor(_MOST) as pool:
            list(pool.map(ExitStack.close, self._ends))

    def _start(self, name: str, model: Path, more: tuple[str, ...]) -> Started:
        began = time.monotonic()
        stack = ExitStack()
        self._ends.append(stack)
        on_gpu = _ON_A_GPU if self._device == "gpu" else ()
        settings = ServerSettings(
            Path(self._options.engine_python),
            model,
            self._device,
            arguments=(*on_gpu, *_EVERYWHERE, *more),
            environment=dict(self._environment(saver=SAVER in more)),
        )
        log = Path(self._options.out) / f"engine-{name}.log"
        seconds = _START_SECONDS if self._device == "gpu" else START_SECONDS
        running = stack.enter_context(launched_server(settings, log=log, ready_within_seconds=seconds))
        ready = time.monotonic()
        server = ProbedServer(running.url)
        stack.callback(server.channel.close)
        server.generate(PROMPTS, 2, None)
        server.score(TEXT, None)
        return Started(server, round(ready - began, 2), round(time.monotonic() - ready, 2))

    def _environment(self, *, saver: bool) -> Iterator[tuple[str, str]]:
        before = os.environ.get("PYTHONPATH", "").split(":")
        folders = [*self._options.engine_path, str(HERE), str(_IN_SERVER), *before]
        yield "PYTHONPATH", ":".join(folder for folder in folders if folder)
        if self._device == "gpu":
            yield "TRITON_CACHE_DIR", str(self._kernels)
        if saver:
            # It is preloaded, when nobody has loaded the CUDA runtime that it needs.
            libraries = ":".join([*_folders_of_cuda(), os.environ.get("LD_LIBRARY_PATH", "")]).strip(":")
            yield "LD_LIBRARY_PATH", libraries


def _folders_of_cuda() -> list[str]:
    """Where the CUDA runtime lies that came with torch; nothing where it is the system's own."""
    major = (torch.version.cuda or "").partition(".")[0]
    found = {
        str(file.parent)
        for folder in sys.path
        if major
        for file in Path(folder or ".").glob(f"nvidia/*/lib/libcudart.so.{major}")
    }
    return sorted(found)
