"""A typed error arrives as the same type with the same parts; a foreign one as EngineError with traceback."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from weightlane import errors
from weightlane.errors import EngineError, PlanError, Problem, WeightlaneError
from weightlane.failures import error_of, failure_of
from weightlane.messages import AgentReply, Failure, decode, encode

TYPED = sorted(
    (
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, WeightlaneError) and value is not PlanError
    ),
    key=lambda kind: kind.__name__,
)


def across(error: BaseException, origin: str = "worker 1") -> WeightlaneError:
    reply: Any = decode(encode(failure_of(error, origin=origin)), AgentReply, sender="worker 1")
    assert isinstance(reply, Failure)
    return error_of(reply)


@pytest.mark.parametrize("kind", TYPED)
def test_every_typed_error(kind: type[WeightlaneError]) -> None:
    sent = kind("layers.0.weight was not written.", "It is tied.", "Untie it.")
    got = across(sent)
    assert type(got) is kind
    assert got.what == "layers.0.weight was not written. (from worker 1)"
    assert (got.why, got.fix) == (sent.why, sent.fix)


def test_there_are_typed_errors_to_test() -> None:
    assert len(TYPED) >= 14


def test_a_second_border_adds_no_second_origin_when_it_is_named() -> None:
    once = across(errors.SyncError("It failed.", "why", "fix"))
    assert across(once).what == once.what


def test_plan_errors_keep_every_problem_and_their_text() -> None:
    sent = PlanError(
        [
            Problem("missing-name", "a.weight", "is not exported", "Export it.", ("b.weight", "c.weight")),
            Problem("dtype", "d", "cannot travel"),
        ],
        lane="lane-1",
    )
    got = across(sent)
    assert isinstance(got, PlanError)
    assert (got.problems, got.lane, str(got)) == (sent.problems, "lane-1", str(sent))


def test_a_foreign_error_brings_its_traceback() -> None:
    def loader_that_fails() -> None:
        raise KeyError("lm_head.weight")

    try:
        loader_that_fails()
    except KeyError as error:
        got = across(error)
    assert type(got) is EngineError
    assert "KeyError: 'lm_head.weight'" in got.what
    assert "loader_that_fails" in got.remote_traceback  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Problem", "near_names", "annotations", "SystemExit", "no such thing"])
def test_a_type_that_is_no_typed_error_is_not_looked_up(name: str) -> None:
    assert type(error_of(Failure(name, "what"))) is EngineError


def test_text_that_is_not_unicode_still_travels() -> None:
    bad = b"/models/\xff".decode(errors="surrogateescape")
    assert "/models/?" in str(across(FileNotFoundError(bad)))
    assert "/models/?" in str(across(errors.EngineError(bad)))
    plan = across(PlanError([Problem("shape", bad, bad, bad, (bad,))], lane=bad))
    assert "/models/?" in str(plan)
