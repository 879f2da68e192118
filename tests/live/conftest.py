"""What the live tests are given. What is not given fails them: a live test that skips proves nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # makes `changing_trainers` importable

EVERY_RUN = 2
"""How many syncs tests of the real model make in every run (`--syncs`)."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what is marked `long_run` to long runs: the same over another engine is in every one.

    What is marked `matrix` is left to runs that are given the versions it is about.
    """
    left = set() if config.getoption("--syncs") > EVERY_RUN else {"long_run"}
    if not config.getoption("--sglang-versions"):
        left.add("matrix")
    later = [item for item in items if any(item.get_closest_marker(mark) for mark in left)]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]


@pytest.fixture(scope="session")
def vllm_python(pytestconfig: pytest.Config) -> Path:
    """The interpreter of an environment that has vLLM and weightlane-vllm."""
    return _existing_file(pytestconfig, "--vllm-python")


@pytest.fixture(scope="session")
def vllm_older(pytestconfig: pytest.Config) -> Path:
    """The folder that holds an older vLLM, for PYTHONPATH in the environment of `vllm_python`."""
    folder = Path(_required(pytestconfig, "--vllm-older")).absolute()
    if not (folder / "vllm").is_dir():
        pytest.fail(f"--vllm-older={folder}: there is no vllm in it", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def sglang_python(pytestconfig: pytest.Config) -> Path:
    """The interpreter of an environment that has SGLang and weightlane-sglang."""
    return _existing_file(pytestconfig, "--sglang-python")


@pytest.fixture(scope="session")
def sglang_newer(pytestconfig: pytest.Config) -> Path:
    """The folder that turns this environment into one of SGLang 0.5.23."""
    folder = Path(_required(pytestconfig, "--sglang-newer")).absolute()
    if not (folder / "sglang").is_dir():
        pytest.fail(f"{folder} holds no sglang", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def models_dir(pytestconfig: pytest.Config) -> Path:
    """The folder that holds SmolLM2-135M-Instruct and SmolLM2-135M-Instruct-tp2."""
    folder = Path(_required(pytestconfig, "--models-dir")).absolute()
    if not (folder / "smollm2.json").is_file():
        pytest.fail(
            f"{folder} holds no finished models: run python examples/smollm2.py {folder}", pytrace=False
        )
    return folder


@pytest.fixture(scope="session")
def syncs(pytestconfig: pytest.Config) -> int:
    """How many syncs of the real model a test makes; two in every run, more for long ones."""
    number = int(pytestconfig.getoption("--syncs"))
    if number < 2:
        pytest.fail(f"--syncs={number}: a lane's second sync is another one than its first", pytrace=False)
    return number


def _existing_file(config: pytest.Config, option: str) -> Path:
    # absolute, not resolve: a venv's interpreter is a link, and following it would leave the venv
    path = Path(_required(config, option)).absolute()
    if not path.is_file():
        pytest.fail(f"{option}={path}: there is no such file", pytrace=False)
    return path


def _required(config: pytest.Config, option: str) -> str:
    value = config.getoption(option)
    if not value:
        pytest.fail(f"needs {option}; nox -s live_vllm live_sglang gives it", pytrace=False)
    return str(value)
