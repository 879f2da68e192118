"""What the interpreter of an engine's environment can tell before the engine is started with it."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineError
from weightlane.interrupts import interrupts_held

if TYPE_CHECKING:
    from pathlib import Path

_LOOK_SECONDS = 60.0
_TORCH_SECONDS = 180.0  # a cold import on a busy machine
_LOOK = "import sys; from importlib.metadata import version; [version(name) for name in sys.argv[1:]]"
_FOLDERS = "import json, sys; print(json.dumps([folder for folder in sys.path if folder]))"
_GPU = "import torch; print('gpu' if torch.cuda.is_available() else 'cpu')"


def require_distributions(python: Path, engine: str, *names: str, fix: str) -> None:
    """Looks for distributions in the engine's environment, by metadata, before a slow start fails there.

    Raises:
        EngineError: the interpreter does not run, or lacks one of `names`; `fix` is what pip is to install.
    """
    found = _run(python, engine, _LOOK, *names, seconds=_LOOK_SECONDS)
    if found.returncode != 0:
        raise EngineError(
            f"The environment of {python} cannot run {engine}: {_last_line(found.stderr)}.",
            f"It needs {' and '.join(names)}.",
            f"Run {python} -m pip install {fix}, or give --rollout-python another environment.",
        )


def import_folders(python: Path, engine: str, *, option: str) -> tuple[str, ...]:
    """The folders that this interpreter imports from, in which its distributions can be looked up.

    Raises:
        EngineError: the interpreter that `option` names does not run, or gives no answer.
    """
    asked = _run(python, engine, _FOLDERS, seconds=_LOOK_SECONDS, option=option)
    try:
        folders: list[str] = msgspec.json.decode(asked.stdout, type=list[str])
    except msgspec.DecodeError as error:
        raise EngineError(
            f"{python} does not tell where it imports from: {_last_line(asked.stderr)}.",
            f"{option} is to name the Python interpreter of the environment that holds {engine}.",
            f"Give {option} that interpreter.",
        ) from error
    return tuple(folders)


def has_gpu(python: Path, engine: str) -> bool:
    """Whether the torch of the engine's environment can use a GPU of this machine.

    The one that asks may have another torch, or none that knows of GPUs.

    Raises:
        EngineError: that interpreter does not run, or has no torch to ask.
    """
    asked = _run(python, engine, _GPU, seconds=_TORCH_SECONDS)
    answer = (asked.stdout.strip().splitlines() or [""])[-1]
    if asked.returncode != 0 or answer not in {"gpu", "cpu"}:
        raise EngineError(
            f"The torch of {python} cannot tell whether there is a GPU: {_last_line(asked.stderr)}.",
            f"{engine} is started for a GPU or for CPU, and which of the two is not guessed.",
            "Mend that environment, or start the engine yourself and give its --url and --model.",
        )
    return answer == "gpu"


def _run(
    python: Path,
    engine: str,
    code: str,
    *arguments: str,
    seconds: float,
    option: str = "--rollout-python",
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-c", code, *arguments]
    pipe = subprocess.PIPE
    try:
        with ExitStack() as stack:
            with interrupts_held():
                process = stack.enter_context(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
                )
                stack.callback(process.kill)
            out, err = process.communicate(timeout=seconds)
            return subprocess.CompletedProcess(command, process.returncode, out, err)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"The interpreter {python} does not run: {error}.",
            f"{engine} is to be started with it.",
            f"Give {option} the interpreter of the environment that holds the engine.",
        ) from error


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1].removesuffix(".")
