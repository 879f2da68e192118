"""A pytest plugin: `@pytest.mark.requirement("R12")` says that a test shows a line of `requirements.toml`.

A test shows a requirement when it would fail if the code that exists did not meet it. Where only a part has
code yet, the mark names that part, `requirement("R67", part="mode full")`, and the line counts as shown in
part. A mark that names no known line is a collection error. `--requirements` runs nothing, and lists every
line with the tests that show it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import requirement_list
from requirement_listing import TOLD, Line, Proof, listing

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

MARK = "requirement"
FORM = 'requirement("R1") or requirement("R1", part="...")'


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("requirements", "requirements and the tests that show them")
    group.addoption(
        "--requirements", action="store_true", help="list every requirement with its tests; runs no test"
    )
    group.addoption(
        "--requirements-json", metavar="FILE", help="the same list, as JSON into FILE; runs no test"
    )


def pytest_configure(config: pytest.Config) -> None:
    marks = RequirementMarks(config)
    if marks.asked and config.getoption("dist", "no") != "no":
        raise pytest.UsageError("the list of requirements runs no test: leave out -n")
    config.pluginmanager.register(marks, "requirement-marks")


class RequirementMarks:
    """Checks marks as tests are collected, and lists them when asked to."""

    def __init__(self, config: pytest.Config) -> None:
        self._known = requirement_list.read_requirements()
        self._json: str | None = config.getoption("--requirements-json")
        self._print: bool = config.getoption("--requirements")
        self._items: Sequence[pytest.Item] = ()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        items = [node for node in report.result or () if isinstance(node, pytest.Item)]
        wrong = [f"{item.nodeid}: {problem}" for item in items for problem in self._problems_of(item)]
        if wrong:
            report.outcome, report.result, report.longrepr = "failed", [], "\n".join(wrong)
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = tuple(session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        # None lets pytest itself go on, which after a failed collection ends the run with an error.
        return True if self.asked and not session.testsfailed else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if not self.asked or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        lines = self._lines()
        if self._json:
            data = {"requirements": [line.as_data() for line in lines]}
            Path(self._json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if self._print:
            terminalreporter.section("requirements and the tests that show them")
            for text in listing(lines):
                terminalreporter.write_line(text)

    @property
    def asked(self) -> bool:
        """Whether the list is wanted instead of a run."""
        return self._print or bool(self._json)

    def _problems_of(self, item: pytest.Item) -> Iterator[str]:
        for mark in item.iter_markers(MARK):
            name = mark.args[0] if len(mark.args) == 1 else None
            part = mark.kwargs.get("part", "all")
            if (
                not isinstance(name, str)
                or not isinstance(part, str)
                or not part
                or set(mark.kwargs) - {"part"}
            ):
                given = [*map(repr, mark.args), *(f"{key}={value!r}" for key, value in mark.kwargs.items())]
                yield f"{MARK}({', '.join(given)}) is not of the form {FORM}"
            elif name not in self._known:
                first, *_, last = self._known
                listed = f"{requirement_list.REQUIREMENTS.name} lists {first} to {last}"
                yield f"{name!r} is no requirement; {listed}"

    def _lines(self) -> list[Line]:
        cases: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
        for item in self._items:
            marks = tuple(name for name in TOLD if item.get_closest_marker(name))
            for name, part in {(m.args[0], m.kwargs.get("part", "")) for m in item.iter_markers(MARK)}:
                cases[name, _function_of(item), part, marks] += 1
        lines = {name: Line(requirement) for name, requirement in self._known.items()}
        for (name, test, part, marks), count in cases.items():
            lines[name].proofs.append(Proof(test, part, marks, count))
        return list(lines.values())


def _function_of(item: pytest.Item) -> str:
    """The node id without the parameters."""
    return item.nodeid.removesuffix(item.name) + str(getattr(item, "originalname", None) or item.name)
