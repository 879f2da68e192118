"""Options of the live tests. They are here because pytest reads options only from the outermost conftests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightlane", "real engines")
    group.addoption("--vllm-python", metavar="PYTHON", help="interpreter of an environment that has vLLM")
    group.addoption("--sglang-python", metavar="PYTHON", help="interpreter of an environment that has SGLang")
    group.addoption("--models-dir", metavar="DIR", help="where examples/smollm2.py wrote its folders")
