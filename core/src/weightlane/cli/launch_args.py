"""`weightlane launch-args`: how an engine must be started so that a lane can reach it."""

from __future__ import annotations

import shlex
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightlane.cli.launching import NO_MODEL, Device, Launch, LaunchWish, plan_engine_launch
from weightlane.cli.locked import Locked
from weightlane.cli.output import print_json, print_line
from weightlane.notices import PluginWarning
from weightlane.registry import get_registry
from weightlane.types import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightlane.adapters import SwapPolicy
    from weightlane.types import MemoryTag

app = typer.Typer(add_completion=False)


class SwapChoice(str, Enum):
    """How a lane in mode adapter will put a new adapter in the place of the old one."""

    TWO_SLOT = "two_slot"
    PAUSED = "paused"


class MemoryChoice(str, Enum):
    """Memory that a lane will have the engine let go of while it does not generate."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class DeviceChoice(str, Enum):
    """What the engine is to run on."""

    CPU = "cpu"
    GPU = "gpu"


_SWAPS: dict[SwapChoice, SwapPolicy] = {SwapChoice.TWO_SLOT: "two_slot", SwapChoice.PAUSED: "paused"}
_TAGS: dict[MemoryChoice, MemoryTag] = {MemoryChoice.WEIGHTS: "weights", MemoryChoice.KV_CACHE: "kv_cache"}
_DEVICES: dict[DeviceChoice, Device] = {DeviceChoice.CPU: "cpu", DeviceChoice.GPU: "gpu"}


@app.command("launch-args")
def launch_args(
    engine: Annotated[str, typer.Argument(help="Rollout engine, such as reference, vllm or sglang.")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint folder; left out, the command reads $MODEL."),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="What the lane will move.")] = Mode.FULL,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel workers of the engine.")] = 1,
    device: Annotated[
        DeviceChoice | None,
        typer.Option(help="What the engine runs on; left out, the engine's own torch is asked."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Interpreter of the engine's environment, where that is not this one."
        ),
    ] = None,
    address: Annotated[
        str, typer.Option(help="Where a lane is to reach it: unix:/PATH, tcp:127.0.0.1:PORT or http://…")
    ] = "",
    swap: Annotated[
        SwapChoice | None,
        typer.Option(help="With --mode adapter: how adapters will be swapped; two_slot if left out."),
    ] = None,
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, help="With --mode adapter: the largest rank of the adapter's modules."),
    ] = None,
    release: Annotated[
        list[MemoryChoice] | None,
        typer.Option(help="What connect(release=...) will name; give it once for each."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a shell command.")
    ] = False,
    locked: Locked = None,
) -> None:
    """Print the command that starts an engine so that a lane can reach it.

    Standard output gets the command, to be pasted into a shell; standard error what was chosen, on which
    evidence, and what to know besides. Nothing is started. Exit status 1 if the engine cannot be started
    so or a lock is not met, 2 for wrong usage.
    """
    for option, value in (("--swap", swap), ("--lora-rank", lora_rank)):
        if value is not None and mode is not Mode.ADAPTER:
            raise typer.BadParameter("it has a meaning with --mode adapter alone", param_hint=option)
    wish = LaunchWish(
        engine=engine,
        mode=mode,
        model=model,
        tensor_parallel=tp,
        device=_DEVICES[device] if device else None,
        python=_interpreter(python),
        address=address,
        swap=_SWAPS[swap or SwapChoice.TWO_SLOT],
        lora_rank=lora_rank or 0,
        release=tuple(tag for choice, tag in _TAGS.items() if choice in (release or ())),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # notes and errors say what concerns this engine
        registry = get_registry()
        launch = plan_engine_launch(registry if locked is None else registry.under_lock(locked), wish)
    if as_json:
        print_json(launch)
        return
    print_line(shell_command(launch))
    sys.stderr.writelines(f"# {line}\n" for line in _remarks(launch))


def shell_command(launch: Launch) -> str:
    """One command for a POSIX shell, on several lines; `env` sets the variables, so that any shell can."""
    head = shlex.join(["env", *(f"{name}={value}" for name, value in launch.environment.items())])
    lines = [head] if launch.environment else []
    lines += [" ".join(map(_quoted, words)) for words in _options(launch.command)]
    return " \\\n  ".join(lines)


def _quoted(word: str) -> str:
    # Unset, the shell says what is missing instead of starting an engine with an empty name.
    return '"${MODEL:?must name the checkpoint folder}"' if word == NO_MODEL else shlex.quote(word)


def _options(words: Sequence[str]) -> Iterator[list[str]]:
    """The words, an option with its value to a line."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield line
            line = []
        line.append(word)
    yield line


def _remarks(launch: Launch) -> Iterator[str]:
    yield f"{launch.engine} {launch.engine_version} for mode {launch.mode.value} on {launch.device}"
    yield f"chosen: {launch.backend} (era {launch.era}) of {launch.distribution}"
    yield from (f"  {line}" for line in launch.evidence)
    yield from (f"note: {note}" for note in launch.notes)
    if launch.rollout:
        yield f"a lane reaches it as {launch.rollout}"


def _interpreter(python: Path | None) -> Path | None:
    # Not resolved: a virtual environment's interpreter is a link, and following it leaves the environment.
    return python.absolute() if python else None
