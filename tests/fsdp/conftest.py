"""Makes the helpers importable, and runs all cases of a world size in one start of its ranks."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

if TYPE_CHECKING:
    from collections.abc import Callable

    from case_outcomes import Outcomes


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Outcomes]:
    """What the ranks of a program told, by case: the program is started once a session."""
    from case_outcomes import outcomes_of

    @cache
    def run(program: str, world_size: int) -> Outcomes:
        folder = tmp_path_factory.mktemp(program)
        return outcomes_of(HERE / f"{program}.py", world_size, folder)

    return run
