"""Runs of pytest inside pytest: which marks are refused, and what `--requirements` says of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requirement_list

LIST = """
[R1]
area = "Names"
text = "Names stay as they are."
upstream = [7014, 5564]
[R2]
area = "Names"
text = "Nothing is renamed twice."
[R3]
area = "Transport"
text = "Nothing waits for ever."
"""

TESTS = """
import pytest

@pytest.mark.requirement("R1")
@pytest.mark.parametrize("n", [1, 2, "a::b[c]"])
def test_names(n):
    raise AssertionError("it was run")

@pytest.mark.live
@pytest.mark.requirement("R1")
def test_names_live(): ...

class TestWaits:
    pytestmark = [pytest.mark.gpu, pytest.mark.requirement("R3", part="on one host")]
    def test_it(self): ...
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose list is `LIST`, with the settings of this one that matter here."""
    listed = pytester.path / "short.toml"
    listed.write_text(LIST)
    monkeypatch.setattr(requirement_list.read_requirements, "__defaults__", (listed,))
    monkeypatch.setattr(requirement_list, "REQUIREMENTS", listed)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others would be imported anew in each run
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        addopts = ["--import-mode=importlib", "--strict-markers", "-p", "requirement_marks"]
        filterwarnings = ["error"]
        markers = ["requirement(id): shows it", "live: needs an engine", "gpu: needs a GPU"]
        """
    )
    return pytester


def run(inner: pytest.Pytester, *options: str) -> pytest.RunResult:
    return inner.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_a_plain_run_checks_marks_and_does_not_mind_open_requirements(inner: pytest.Pytester) -> None:
    inner.makepyfile('import pytest\n@pytest.mark.requirement("R1")\ndef test_a(): ...\ndef test_b(): ...')
    result = run(inner)
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    assert "Nothing is renamed" not in result.stdout.str()


BAD = {
    'requirement("R4")': "'R4' is no requirement; short.toml lists R1 to R3",
    'requirement("r1")': "'r1' is no requirement",
    "requirement": "requirement() is not of the form",
    "requirement()": "requirement() is not of the form",
    "requirement(1)": "requirement(1) is not of the form",
    'requirement(["R1"])': "requirement(['R1']) is not of the form",
    'requirement("R1", "R2")': "requirement('R1', 'R2') is not of the form",
    'requirement(id="R1")': "requirement(id='R1') is not of the form",
    'requirement("R1", part="")': "requirement('R1', part='') is not of the form",
    'requirement("R1", part=2)': "requirement('R1', part=2) is not of the form",
}


@pytest.mark.parametrize("options", [(), ("--requirements",)], ids=["plain", "listing"])
def test_marks_that_name_no_requirement_are_collection_errors_naming_each_test(
    inner: pytest.Pytester, options: tuple[str, ...]
) -> None:
    functions = [f"@pytest.mark.{mark}\ndef test_{number}(): ..." for number, mark in enumerate(BAD)]
    inner.makepyfile(
        test_bad="\n".join(["import pytest", *functions, "def test_beside(): ..."]),
        test_good="def test_good(): ...",
    )
    result = run(inner, *options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert "ERROR collecting test_bad.py" in text
    for number, told in enumerate(BAD.values()):
        assert f"test_bad.py::test_{number}: {told}" in text
    assert "test_beside" not in text
    assert "no test\n" not in text, "a list that lacks a file's tests would mislead"


def test_marks_of_classes_modules_and_single_cases_are_checked_and_all_told(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.requirement("of the module")

        @pytest.mark.requirement("of the class")
        class TestIt:
            def test_method(self): ...

        @pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.requirement("of a case"))])
        def test_cases(n): ...
        """
    )
    text = run(inner).stdout.str()
    for told in ("test_cases[2]: 'of a case'", "test_cases[1]: 'of the module'"):
        assert told in text
    inner.makepyfile(
        "import pytest\n@pytest.mark.requirement('R9')\nclass TestIt:\n    def test_method(self): ...\n"
    )
    assert "::TestIt::test_method: 'R9'" in run(inner).stdout.str()


def test_the_list_names_every_requirement_with_its_tests_and_runs_none(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_one=TESTS)
    result = run(inner, "--requirements")
    assert result.ret == 0
    result.assert_outcomes()
    text = result.stdout.str()
    assert text[text.index("\nNames\n") : text.index("\n=", text.index("\nNames\n"))] == (
        """
Names
R1  Names stay as they are. (verl #7014, #5564)
      test_one.py::test_names (3 cases)
      test_one.py::test_names_live (live)
R2  Nothing is renamed twice.
      no test

Transport
R3  Nothing waits for ever.
      test_one.py::TestWaits::test_it (gpu, in part: on one host)

1 of 3 shown: R1
1 of 3 in part: R3
1 of 3 open: R2
1 of 3 by live or gpu tests alone: R3"""
    )


def test_the_same_is_had_as_data(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_one=TESTS)
    result = run(inner, "--requirements-json=told.json")
    assert result.ret == 0
    assert "no test\n" not in result.stdout.str()
    told = {line["id"]: line for line in json.loads(Path("told.json").read_text())["requirements"]}
    assert {name: line["state"] for name, line in told.items()} == {
        "R1": "shown",
        "R2": "open",
        "R3": "in part",
    }
    assert (told["R1"]["upstream"], told["R1"]["area"]) == ([7014, 5564], "Names")
    assert told["R1"]["tests"] == [
        {"test": "test_one.py::test_names", "cases": 3, "marks": [], "part": ""},
        {"test": "test_one.py::test_names_live", "cases": 1, "marks": ["live"], "part": ""},
    ]


def test_a_deselected_test_is_not_listed(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_one=TESTS)
    text = run(inner, "--requirements", "-m", "not live").stdout.str()
    assert "test_names_live" not in text
    assert "test_names (3 cases)" in text


def test_a_test_that_does_not_run_or_may_fail_shows_nothing(inner: pytest.Pytester) -> None:
    marks = ("skip", "skipif(True, reason='')", "xfail")
    functions = [
        f"@pytest.mark.{mark}\n@pytest.mark.requirement('R{number}')\ndef test_{number}(): ..."
        for number, mark in enumerate(marks, 1)
    ]
    inner.makepyfile(test_one="\n".join(["import pytest", *functions]))
    text = run(inner, "--requirements").stdout.str()
    for number, mark in enumerate(("skip", "skipif", "xfail"), 1):
        assert f"test_one.py::test_{number} ({mark})" in text
    assert "3 of 3 open: R1 R2 R3" in text


def test_an_error_elsewhere_is_an_error_of_the_listing_too(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_broken="import no_such_module", test_one=TESTS)
    result = run(inner, "--requirements")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "ERROR collecting test_broken.py" in result.stdout.str()


def test_a_list_that_several_processes_would_make_is_refused(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_one=TESTS)
    result = run(inner, "-p", "xdist.plugin", "-n", "2", "--requirements")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "leave out -n" in result.stderr.str()


def test_the_list_of_this_repository_is_whole() -> None:
    found = requirement_list.read_requirements()
    assert list(found) == [f"R{number}" for number in range(1, 92)]
    texts = [requirement.text for requirement in found.values()]
    assert len(set(texts)) == len(texts)
    for requirement in found.values():
        assert requirement.text.endswith(".")
        assert len(requirement.text) <= 115
        assert requirement.area
        assert all(number > 1000 for number in requirement.upstream)
