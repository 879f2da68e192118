"""Starts the rollout engine that a demo is to use, in the environment that holds it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weightlane.adapters import SLOTS_NEEDED
from weightlane.demo.interpreter import has_gpu, import_folders, require_distributions
from weightlane.errors import EngineError
from weightlane.front.process import last_lines, start_front_process
from weightlane.reference.launch import ENVIRONMENT, server_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_START_SECONDS = 600.0
_SEQUENCES = 32  # as many as a step asks for, so that an engine generates them in one go


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that answers at `url`. `log` is None for one that somebody else started."""

    url: str
    log: Path | None = None

    def last_words(self) -> str:
        """The end of its log, or "" where there is none."""
        return last_lines(self.log, 12) if self.log else ""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """What to start and where: `python` is the interpreter of the engine's environment, `folder` a private
    one for socket and log. `lora_rank` is that of the adapter it is to receive, 0 for none."""

    engine: str
    model: Path
    python: Path
    folder: Path
    lora_rank: int = 0


def start_engine(start: EngineStart) -> AbstractContextManager[RunningEngine]:
    """The engine, from the moment it answers until the block ends.

    Raises:
        EngineError: the demo has no recipe for this engine, its interpreter does not exist or lacks a
            distribution, or it did not come up; shows the end of its log.
    """
    recipe = RECIPES.get(start.engine)
    if recipe is None:
        raise EngineError(
            f"The demo cannot start {start.engine}.",
            f"It has recipes for {', '.join(sorted(RECIPES))}.",
            "Start the engine yourself, and give its --url and --model.",
        )
    return recipe(start)


def own_python() -> Path:
    """The interpreter of this process, not resolved: a venv's interpreter is a link."""
    return Path(sys.executable)


@contextmanager
def _start_reference(start: EngineStart) -> Iterator[RunningEngine]:
    require_distributions(
        start.python, start.engine, "weightlane", "transformers", fix='"weightlane[reference]"'
    )
    address, log = f"unix:{start.folder}/engine.sock", start.folder / "engine.log"
    command = [str(start.python), *server_arguments(str(start.model), address, device="cpu")]
    command += ["--threads", "1"]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    with start_front_process(
        command, address, log=log, ready_timeout_seconds=_START_SECONDS, environment=environment
    ):
        yield RunningEngine(address, log)


@contextmanager
def _start_vllm(start: EngineStart) -> Iterator[RunningEngine]:
    # Imported here: the plugins stand on this distribution, which runs without them.
    from weightlane_vllm.launch import FrontStart, LoraStart, front_command, front_environment
    from weightlane_vllm.lora_rank import max_lora_rank

    require_distributions(start.python, start.engine, "weightlane-vllm", fix="weightlane-vllm")
    address, log = f"unix:{start.folder}/engine.sock", start.folder / "engine.log"
    device: Literal["cpu", "gpu"] = "gpu" if has_gpu(start.python, start.engine) else "cpu"
    lora = LoraStart(SLOTS_NEEDED["two_slot"], max_lora_rank(start.lora_rank)) if start.lora_rank else None
    front = FrontStart(str(start.model), address, device, sequences=_SEQUENCES, lora=lora)
    with start_front_process(
        front_command(front, python=str(start.python)),
        address,
        log=log,
        ready_timeout_seconds=_START_SECONDS,
        environment=front_environment(front),
    ):
        yield RunningEngine(address, log)


@contextmanager
def _start_sglang(start: EngineStart) -> Iterator[RunningEngine]:
    from weightlane_sglang.adapter_launch import lora_arguments
    from weightlane_sglang.launch import ServerSettings, launched_server, loader_arguments

    require_distributions(start.python, start.engine, "sglang", fix="sglang")
    folders = import_folders(start.python, start.engine, option="--rollout-python")
    arguments = ("--max-running-requests", str(_SEQUENCES), *loader_arguments(folders))
    device: Literal["cpu", "gpu"] = "gpu" if has_gpu(start.python, start.engine) else "cpu"
    if start.lora_rank:
        arguments += lora_arguments(start.lora_rank, "two_slot", device=device)
    settings = ServerSettings(python=start.python, model=start.model, device=device, arguments=arguments)
    log = start.folder / "engine.log"
    with launched_server(settings, log=log, ready_within_seconds=_START_SECONDS) as server:
        yield RunningEngine(server.url, log)


RECIPES: dict[str, Callable[[EngineStart], AbstractContextManager[RunningEngine]]] = {
    "reference": _start_reference,
    "vllm": _start_vllm,
    "sglang": _start_sglang,
}
"""Engines that the demo can start by itself; any other that a plugin registers is reached by its URL."""
