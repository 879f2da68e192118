"""What the tests of `nox -s matrix` are given: other SGLang versions, and a place for their result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
sys.path[:0] = [str(HERE), str(ROOT / "tests/matrix")]

from kept_result import MatrixResult  # noqa: E402
from other_versions import EVERY_VERSION  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def sglang_versions(pytestconfig: pytest.Config) -> Path:
    """The folder that has one of every other version, each to go before SGLang's environment."""
    folder = Path(pytestconfig.getoption("--sglang-versions")).absolute()
    missing = [version for version in EVERY_VERSION if not (folder / version / "sglang").is_dir()]
    if missing:
        pytest.fail(f"{folder} holds no sglang {', '.join(missing)}", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def matrix_result(request: pytest.FixtureRequest) -> Iterator[MatrixResult]:
    """Collects; written at the end of a run that was asked for a file and in which nothing failed."""
    found = MatrixResult()
    yield found
    file = request.config.getoption("--matrix-result")
    if file and not request.session.testsfailed:
        found.write(Path(file), ROOT)
