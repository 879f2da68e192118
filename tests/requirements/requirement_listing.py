"""Requirements beside the tests that show them, for people and as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from requirement_list import Requirement

# Marks that tell a reader whether, and where, a test runs.
TOLD = ("live", "gpu", "skip", "skipif", "xfail")
ELSEWHERE = frozenset(TOLD[:2])
SHOWS_NOTHING = frozenset(TOLD[2:])


@dataclass(frozen=True)
class Proof:
    """One test function that shows a requirement, with the number of its cases that carry the mark."""

    test: str
    part: str
    marks: tuple[str, ...]
    cases: int

    @property
    def counts(self) -> bool:
        return not SHOWS_NOTHING.intersection(self.marks)

    def __str__(self) -> str:
        told = [f"{self.cases} cases"] if self.cases > 1 else []
        told += self.marks
        told += [f"in part: {self.part}"] if self.part else []
        return f"{self.test} ({', '.join(told)})" if told else self.test


@dataclass
class Line:
    """A requirement and what shows it."""

    requirement: Requirement
    proofs: list[Proof] = field(default_factory=list)

    @property
    def state(self) -> Literal["shown", "in part", "open"]:
        parts = [bool(proof.part) for proof in self.proofs if proof.counts]
        if not parts:
            return "open"
        return "in part" if all(parts) else "shown"

    @property
    def only_elsewhere(self) -> bool:
        """Whether all that shows it needs an engine or a GPU."""
        counting = [proof for proof in self.proofs if proof.counts]
        return bool(counting) and all(ELSEWHERE.intersection(proof.marks) for proof in counting)

    def as_data(self) -> dict[str, Any]:
        return {
            "id": self.requirement.id,
            "area": self.requirement.area,
            "text": self.requirement.text,
            "upstream": list(self.requirement.upstream),
            "state": self.state,
            "tests": [
                {"test": proof.test, "cases": proof.cases, "marks": list(proof.marks), "part": proof.part}
                for proof in self.proofs
            ],
        }


def listing(lines: Sequence[Line]) -> Iterator[str]:
    """The list as people read it: open lines are in it like all others, and once more at its end."""
    area = ""
    for line in lines:
        if line.requirement.area != area:
            area = line.requirement.area
            yield ""
            yield area
        upstream = ", ".join(f"#{number}" for number in line.requirement.upstream)
        yield f"{line.requirement.id:4}{line.requirement.text}" + (f" (verl {upstream})" if upstream else "")
        yield from (f"      {proof}" for proof in line.proofs)
        if line.state == "open":
            yield "      no test"
    yield ""
    for state in ("shown", "in part", "open"):
        yield _summary(state, [line for line in lines if line.state == state], len(lines))
    yield _summary("by live or gpu tests alone", [line for line in lines if line.only_elsewhere], len(lines))


def _summary(what: str, lines: Sequence[Line], of: int) -> str:
    return f"{len(lines)} of {of} {what}: {' '.join(line.requirement.id for line in lines) or 'none'}"
