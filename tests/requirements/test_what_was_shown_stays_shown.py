"""Requirements that are met for good keep a test that shows each whole, and that needs no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from marks_in_sources import lines_of_sources, proofs_of
from requirement_list import read_requirements
from requirement_listing import Line

TESTS = Path(__file__).parents[1]
SHOWN = [
    *("R19", "R20", "R21", "R25", "R26", "R27", "R29", "R86", "R87"),
    *(f"R{number}" for number in range(39, 69)),
]


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    return lines_of_sources(TESTS, read_requirements())


@pytest.mark.parametrize("name", SHOWN)
def test_a_requirement_that_is_met_has_a_test_that_shows_it_whole(lines: dict[str, Line], name: str) -> None:
    line = lines[name]
    assert line.state == "shown", [str(proof) for proof in line.proofs]
    assert not line.only_elsewhere


SOURCE = """
import pytest

pytestmark = [pytest.mark.requirement("R1", part="of a module")]

@pytest.mark.requirement("R2")
@pytest.mark.parametrize("n", [1, 2])
def test_whole(n): ...

@pytest.mark.live
@pytest.mark.requirement("R3")
async def test_live(): ...

@pytest.mark.skipif(True, reason="")
@pytest.mark.requirement("R4")
def test_skipped(): ...

@pytest.mark.gpu
class TestClass:
    pytestmark = pytest.mark.requirement("R5")
    @pytest.mark.requirement("R6", part="of a method")
    def test_method(self): ...

@pytest.mark.requirement("R7")
def no_test(): ...
"""


def test_marks_are_read_as_a_collection_would_read_them() -> None:
    lines = {name: Line(requirement) for name, requirement in read_requirements().items()}
    for name, proof in proofs_of(SOURCE, "test_one.py"):
        lines[name].proofs.append(proof)
    states = {name: (lines[name].state, lines[name].only_elsewhere) for name in list(lines)[:7]}
    assert states == {
        "R1": ("in part", False),
        "R2": ("shown", False),
        "R3": ("shown", True),
        "R4": ("open", False),
        "R5": ("shown", True),
        "R6": ("in part", True),
        "R7": ("open", False),
    }
    assert str(lines["R6"].proofs[0]) == "test_one.py::TestClass::test_method (gpu, in part: of a method)"


def test_a_mark_that_becomes_a_part_or_goes_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    for mark, state in (
        ('requirement("R86")', "shown"),
        ('requirement("R86", part="the first time")', "in part"),
        ("slow", "open"),
    ):
        path.write_text(f"import pytest\n@pytest.mark.{mark}\ndef test_one(): ...\n")
        assert lines_of_sources(tmp_path, read_requirements())["R86"].state == state
