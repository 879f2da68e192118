"""Options of the live tests, and plugins of all tests: pytest takes both from the outermost conftest.

Also how hypothesis works: the same examples at every run, so that what turns a test red is the change under
test; `--hypothesis-profile=search` looks for new ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

# Makes `requirement_marks` importable. Not this folder itself: `import vllm` would find tests/vllm.
sys.path.insert(0, str(Path(__file__).parent / "requirements"))

pytest_plugins = ["requirement_marks", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightlane", "real engines")
    group.addoption("--vllm-python", metavar="PYTHON", help="interpreter of an environment that has vLLM")
    group.addoption(
        "--vllm-older", metavar="FOLDER", help="vLLM 0.27.1 alone, to be put before that environment's own"
    )
    group.addoption("--sglang-python", metavar="PYTHON", help="interpreter of an environment that has SGLang")
    group.addoption(
        "--sglang-newer",
        metavar="DIR",
        help="folder with SGLang 0.5.23, to go before that environment",
    )
    group.addoption(
        "--sglang-versions",
        metavar="DIR",
        help="folder with other SGLang versions, to go before that environment one at a time (nox -s matrix)",
    )
    group.addoption("--matrix-result", metavar="FILE", help="where what those showed is written")
    group.addoption(
        "--syncs",
        type=int,
        default=2,
        help="syncs of live tests with FSDP2 and by mode; above 2: a long run, every mode into every engine",
    )
    group.addoption("--models-dir", metavar="DIR", help="where examples/smollm2.py wrote its folders")


settings.register_profile("weightlane", derandomize=True, deadline=None, database=None)
settings.register_profile("search", deadline=None, max_examples=5000)
settings.load_profile("weightlane")
