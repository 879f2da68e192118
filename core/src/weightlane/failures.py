"""Errors on their way to another process, and back into the typed errors that they were."""

from __future__ import annotations

import traceback

import msgspec

from weightlane import errors


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """An error on its way to another process.

    `error_type` is a class name of `weightlane.errors`, or of a foreign exception; `origin` says which
    process and, for an agent, which plugin raised it.
    """

    error_type: str
    what: str
    why: str = ""
    fix: str = ""
    origin: str = ""
    traceback: str = ""
    problems: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = ()
    lane: str = ""


def failure_of(error: BaseException, *, origin: str) -> Failure:
    """The exception as a message; typed errors keep their parts, foreign ones keep their traceback."""
    if isinstance(error, errors.PlanError):
        return Failure(
            error_type="PlanError",
            what=_encodable(error.what),
            origin=origin,
            lane=_encodable(error.lane),
            problems=tuple(
                (
                    p.kind,
                    _encodable(p.subject),
                    _encodable(p.what),
                    _encodable(p.fix),
                    tuple(map(_encodable, p.near)),
                )
                for p in error.problems
            ),
        )
    if isinstance(error, errors.WeightlaneError):
        return Failure(
            error_type=type(error).__name__,
            what=_encodable(error.what),
            why=_encodable(error.why),
            fix=_encodable(error.fix),
            origin=origin,
            traceback=error.remote_traceback or _local_traceback(error),
        )
    return Failure(
        error_type=type(error).__name__,
        what=_encodable(f"{type(error).__name__}: {error}"),
        origin=origin,
        traceback=_local_traceback(error),
    )


def _local_traceback(error: BaseException) -> str:
    return _encodable("".join(traceback.format_exception(error)))


def _encodable(text: str) -> str:
    # File names that are not UTF-8 reach error texts as lone surrogates, which msgpack refuses.
    return text.encode(errors="replace").decode()


def error_of(failure: Failure) -> errors.WeightlaneError:
    """The failure as the typed error it was, or as an `EngineError` where the type is foreign."""
    if failure.error_type == "PlanError":
        return errors.PlanError([errors.Problem(*fields) for fields in failure.problems], lane=failure.lane)
    known = getattr(errors, failure.error_type, None)
    origin = f" (from {failure.origin})" if failure.origin else ""
    if isinstance(known, type) and issubclass(known, errors.WeightlaneError):
        error = known(
            failure.what + ("" if failure.origin in failure.what else origin), failure.why, failure.fix
        )
    else:
        error = errors.EngineError(failure.what + origin, failure.why, failure.fix)
    error.origin = failure.origin
    error.remote_traceback = failure.traceback
    return error
