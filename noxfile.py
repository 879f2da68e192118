"""Sessions that need environments of their own. `make demo` first: it builds the trainer's.

The live sessions run pytest with the trainer's interpreter, which holds no engine, and hand it the
interpreter of an environment that does. That environment is built for it and removed afterwards (about
3 GB each, `nox_engines.py`); `engine_environments` builds both and the models beforehand, beside other
sessions. The versions that no live session has are those of `nox -s matrix`, in `nox_matrix.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox loads this file alone

import nox_matrix  # noqa: F401 - its sessions are found once it is imported
from nox_engines import (
    BACKEND,
    ROOT,
    SGLANG_FOLDER,
    SWIFTLY,
    TRAINER_PYTHON,
    VLLM_FOLDER,
    build_newer_sglang,
    build_older_vllm,
    build_sglang,
    build_vllm,
    make_models,
    newer_sglang,
    older_vllm,
    require_trainer,
    run_trainer_pytest,
    sglang_python,
    vllm_python,
)

TORCH = "torch==2.13.0"
PLUGINS = [f"plugins/{name}" for name in ("fsdp", "megatron", "vllm", "sglang")]
DISTRIBUTIONS = ["core", *PLUGINS]
PACKAGES = ["weightlane", *(f"weightlane_{Path(plugin).name}" for plugin in PLUGINS)]

# Each release with what it imports with: 0.17 needs a transformers before 5.
PEFT_VERSIONS = {
    "0.12.0": (),
    "0.15.2": (),
    "0.17.1": ("transformers==4.57.*", "huggingface-hub==0.36.*", "tokenizers==0.22.*"),
    "0.19.1": (),
    "0.21.2": (),
}
PEFT_OLDEST = "peft==0.12.0"
# The other era of FSDP2, with what imports beside it; 5 GB, since its CPU build is on PyTorch's index alone.
TORCH_COMPOSABLE = ("torch==2.5.1", "numpy<2.3", *PEFT_VERSIONS["0.17.1"])

nox.options.sessions = ["lint", "types", "tests"]
# Sessions see what they installed and nothing else.
os.environ.pop("PYTHONPATH", None)
# Compiled once: an engine's environment is installed without, and its processes would each do it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONNOUSERSITE"] = "1"


def install_all(session: nox.Session, *more: str) -> None:
    session.install(TORCH, *BACKEND)  # torch first and by name: pip's configuration decides which build
    editable = [word for plugin in PLUGINS for word in ("-e", plugin)]
    session.install("--no-build-isolation", "-e", "core[demo,examples,dev]", *editable, *more)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs no engine and no GPU, with the newest dependencies."""
    install_all(session)
    session.run("pytest", "-m", "not live and not gpu and not fsdp", *session.posargs)


@nox.session(venv_backend="none")
def tests_pluggy_16(session: nox.Session) -> None:
    """What rests on pluggy, with the oldest one allowed: it registers and excludes plugins differently.

    In the trainer's environment, with that pluggy before its own: an environment more would cost minutes.
    """
    folder = ROOT / ".nox" / "pluggy-1.6"
    pip = [str(TRAINER_PYTHON), "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
    session.run(*pip, "--target", str(folder), "pluggy==1.6.*", external=True)
    older = {"PYTHONPATH": str(folder)}
    check = "import pluggy; assert pluggy.__version__.startswith('1.6.'), pluggy.__file__"
    session.run(str(TRAINER_PYTHON), "-c", check, env=older, external=True)
    words = ("-m", "pytest", "tests/core/registry", *session.posargs)
    session.run(str(TRAINER_PYTHON), *words, env=older, external=True)


@nox.session(venv_backend="none")
def peft_versions(session: nox.Session) -> None:
    """The adapter schema on the own objects and layers of each release of peft that it reads.

    In the trainer's environment, with that release before its own. Older releases warn of what they use of
    others, which is none of ours.
    """
    tests = ("tests/core/adapter/test_each_release_of_peft_is_read.py", "-W", "default", *session.posargs)
    for version, others in PEFT_VERSIONS.items():
        folder = ROOT / ".nox" / f"peft-{version}"
        pip = [str(TRAINER_PYTHON), "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
        session.run(*pip, "--target", str(folder), f"peft=={version}", *others, external=True)
        older = {"PYTHONPATH": str(folder)}
        check = f"import peft; assert peft.__version__ == {version!r}, peft.__file__"
        session.run(str(TRAINER_PYTHON), "-c", check, env=older, external=True)
        session.run(str(TRAINER_PYTHON), "-m", "pytest", *tests, env=older, external=True)


@nox.session(venv_backend="none")
def fsdp(session: nox.Session) -> None:
    """Every way of sharding on two and four ranks, then adapters again with the oldest peft.

    In the trainer's environment, which holds the newest peft; the oldest lies in a folder before its own.
    """
    require_trainer(session)
    trainer = str(TRAINER_PYTHON)
    words = ("-m", "pytest", "tests/fsdp", "-m", "fsdp")
    session.run(trainer, *words, *session.posargs, external=True)
    folder = ROOT / ".nox" / "peft-oldest"
    pip = [trainer, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(folder)]
    session.run(*pip, PEFT_OLDEST, external=True)
    older = {"PYTHONPATH": str(folder)}
    check = f"import peft; assert peft.__version__ == {PEFT_OLDEST.partition('==')[2]!r}, peft.__file__"
    session.run(trainer, "-c", check, env=older, external=True)
    session.run(trainer, *words, "-k", "adapters", *session.posargs, env=older, external=True)


@nox.session(venv_backend="none")
def torch_composable(session: nox.Session) -> None:
    """Exports of peft models from two ranks under torch 2.5, where FSDP2 lies below `_composable`.

    Without what that torch cannot do: shards of columns, and forwards of FSDP2 without a GPU, which the
    cases of whole models make.
    """
    require_trainer(session)
    trainer = str(TRAINER_PYTHON)
    folder = ROOT / ".nox" / "torch-composable"
    session.run(trainer, "-m", "pip", *SWIFTLY, "--target", str(folder), *TORCH_COMPOSABLE, external=True)
    older = {"PYTHONPATH": str(folder)}
    check = "import torch; assert torch.__version__.startswith('2.5.1'), torch.__file__"
    session.run(trainer, "-c", check, env=older, external=True)
    which = "two_ranks_export_adapters and not columns"
    words = ("-m", "pytest", "tests/fsdp", "-m", "fsdp", "-W", "default", "-k", which, *session.posargs)
    session.run(trainer, *words, env=older, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    session.install("ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    install_all(session)
    session.run("mypy")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The site, without a warning or a broken link; in the trainer's environment, whose plugins it lists."""
    session.run("make", "docs", external=True)


SMOKE = f"""
import importlib, importlib.metadata, sys
for name in {PACKAGES!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), f"{{name}} comes from {{module.__file__}}"
    dist = name.replace("_", "-")
    assert module.__version__ == importlib.metadata.version(dist), f"{{name}} and {{dist}} differ in version"
print("imported", *{PACKAGES!r})
"""


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all five through their sdists and use them where the repository is out of sight."""
    session.install("build", *BACKEND)
    place = Path(session.create_tmp()).resolve()
    dist, outside, fresh = place / "dist", place / "outside", place / "fresh"
    for folder in (dist, outside):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    for distribution in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), distribution)
    built = sorted(dist.glob("*.whl"))
    untyped = [wheel.name for wheel in built if not holds_marker(wheel)]
    if len(built) != len(DISTRIBUTIONS) or untyped:
        session.error(f"built {[wheel.name for wheel in built]}, without py.typed: {untyped}")

    session.run("python", "-m", "venv", "--clear", str(fresh))
    python = str(fresh / "bin/python")
    session.run(python, "-m", "pip", *SWIFTLY, TORCH, external=True)
    session.run(python, "-m", "pip", *SWIFTLY, *map(str, built), external=True)
    with session.chdir(outside):
        session.run(python, "-c", SMOKE, external=True)
        listing = session.run(str(fresh / "bin/weightlane"), "backends", "--json", silent=True, external=True)
    session.log(listing)
    found = json.dumps(json.loads(str(listing)))
    absent = [name for name in ("torch", "fsdp", "reference", "vllm", "sglang") if f'"{name}"' not in found]
    if absent:
        session.error(f"`weightlane backends --json` does not list {absent}")
    shutil.rmtree(fresh)


def holds_marker(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(name.endswith("/py.typed") for name in archive.namelist())


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """A thousand syncs of a real lane, over either transport between processes; nothing may grow."""
    for transport in ("shm", "inline"):
        words = ("benchmarks/soak.py", f"--transport={transport}", *session.posargs)
        session.run(str(TRAINER_PYTHON), *words, env={"HF_HUB_OFFLINE": "1"}, external=True)


@nox.session(venv_backend="none")
def live_reference(session: nox.Session) -> None:
    """The real model into the reference engine, which needs no environment of its own."""
    run_trainer_pytest(session, "reference")


@nox.session(venv_backend="none")
def live_vllm(session: nox.Session) -> None:
    """Against vLLM's CPU build, beside weightlane's agent; some of it with an older vLLM before that one.

    `-- --syncs 10` is a long run: every way that tests/live/vllm/WAYS.md lists, hours on two cores.
    """
    with vllm_python(session) as python, older_vllm(session, python) as older:
        run_trainer_pytest(session, "vllm", f"--vllm-python={python}", f"--vllm-older={older}")


@nox.session(venv_backend="none")
@nox.parametrize("engine", ["vllm", "sglang"], ids=["vllm", "sglang"])
def contracts(session: nox.Session, engine: str) -> None:
    """Contract snapshots made anew, by two versions of each engine; fails where one differs from ours.

    `nox -s contracts -- --write` takes the new ones instead, `nox -s "contracts(sglang)"` is for one engine.
    """
    fresh = ROOT / ".nox" / "contracts" / engine
    shutil.rmtree(fresh, ignore_errors=True)
    make = vllm_contracts if engine == "vllm" else sglang_contracts
    make(session, str(fresh))
    keep_or_compare(session, fresh, ROOT / f"plugins/{engine}/src/weightlane_{engine}/contracts")


def vllm_contracts(session: nox.Session, fresh: str) -> None:
    """From models that are built in the engine's environment, without data."""
    with vllm_python(session) as python, older_vllm(session, python) as older:
        for before in ({}, {"PYTHONPATH": older}):
            words = (python, "docs/contract_snapshots.py", "vllm", fresh)
            session.run(*words, env={"VLLM_LOGGING_LEVEL": "ERROR", **before}, external=True)


def sglang_contracts(session: nox.Session, fresh: str) -> None:
    """From servers, which the trainer's environment starts and asks."""
    require_trainer(session)
    with sglang_python(session) as python, newer_sglang(session, python) as newer:
        for version in ((), ("--newer", newer)):
            words = (str(TRAINER_PYTHON), "docs/contract_snapshots_live.py", python, fresh, *version)
            session.run(*words, external=True)


def keep_or_compare(session: nox.Session, fresh: Path, kept: Path) -> None:
    if "--write" not in session.posargs:
        session.run("diff", "-ru", str(kept), str(fresh), external=True)  # its status 1 fails the session
        return
    for folder in sorted(fresh.iterdir()):
        shutil.rmtree(kept / folder.name, ignore_errors=True)
        shutil.copytree(folder, kept / folder.name)


@nox.session(venv_backend="none")
def live_sglang(session: nox.Session) -> None:
    """Against SGLang servers, whose environment holds weightlane's plugin: it enters their schedulers."""
    with sglang_python(session) as python, newer_sglang(session, python) as newer:
        run_trainer_pytest(session, "sglang", f"--sglang-python={python}", f"--sglang-newer={newer}")


@nox.session(venv_backend="none")
def engine_environments(session: nox.Session) -> None:
    """The models, and both engines' environments for the next live sessions, which then remove them."""
    require_trainer(session)
    make_models(session)
    for python, build, build_other in (
        (VLLM_FOLDER, build_vllm, build_older_vllm),
        (SGLANG_FOLDER, build_sglang, build_newer_sglang),
    ):
        build(session)
        build_other(session, python=str(python / "bin/python"))
