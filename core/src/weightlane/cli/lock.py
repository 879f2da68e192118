"""`weightlane lock`: write what would be selected here, or compare it with what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from weightlane.cli.output import print_json, print_line, print_lines
from weightlane.contexts import RolloutTarget
from weightlane.lock_check import HeldLock, LockDifference, refuse
from weightlane.lock_file import DEFAULT_LOCK, Lock, read_lock, write_lock_file
from weightlane.lock_selection import Asked, LeftOut, compare, installed_here, select_asked
from weightlane.lock_writing import lock_of
from weightlane.registry import Registry, get_registry

app = typer.Typer(add_completion=False)


class Written(msgspec.Struct, frozen=True):
    """What `lock --json` prints; `left_out` are registered engines that are not installed here."""

    path: str
    lock: Lock
    left_out: tuple[str, ...]


class Compared(msgspec.Struct, frozen=True):
    """What `lock --locked PATH --json` prints; no difference means exit status 0."""

    path: str
    differences: tuple[LockDifference, ...]
    not_selected: tuple[str, ...]


@app.command("lock")
def lock(
    trainer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A training engine to lock, such as torch.")
    ] = None,
    rollout: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A rollout engine to lock, such as vllm.")
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A live engine to ask; needs exactly one --rollout."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="PATH", help="Where to write the lock.")] = DEFAULT_LOCK,
    locked: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write nothing; compare what would be selected with this lock."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write which plugins are selected here, so that later runs can refuse any other.

    Without names, every registered engine that is installed here is locked. A run keeps to a lock by
    WEIGHTLANE_LOCKED=PATH, by connect(locked=PATH) or by --locked PATH of backends, demo, doctor and
    launch-args. Exit status 1 if nothing can be selected for an engine named here, or if --locked finds a
    difference.
    """
    if url and len(rollout or ()) != 1:
        raise typer.BadParameter("give exactly one --rollout with it", param_hint="--url")
    asked = _asked(trainer or [], rollout or [], url or [])
    # Not under a lock of the environment: this command is how one gets a new one, and --locked names another.
    registry = get_registry().without_lock()
    if locked is None:
        _write(registry, asked, out, as_json=as_json)
    else:
        _compare(registry, asked, locked, as_json=as_json)


def _asked(trainers: list[str], rollouts: list[str], urls: list[str]) -> tuple[Asked, ...]:
    asked = [Asked("trainer", name) for name in trainers]
    targets = [RolloutTarget(rollouts[0], address=url) for url in urls]
    asked += [Asked("rollout", target.engine, target) for target in targets]
    asked += [Asked("rollout", name) for name in rollouts if not urls]
    return tuple(asked)


def _write(registry: Registry, asked: tuple[Asked, ...], path: Path, *, as_json: bool) -> None:
    left_out: tuple[LeftOut, ...] = ()
    if not asked:
        asked, left_out = installed_here(registry)
    made = lock_of(select_asked(registry, asked))
    write_lock_file(made, path)
    if as_json:
        print_json(Written(str(path), made, tuple(f"{item.asked}: {item.reason}" for item in left_out)))
        return
    for row in made.backends:
        print_line(f"{row.role} {row.engine}: {row.origin}")
        print_lines(row.evidence, 2)
    for item in left_out:
        print_line(f"not locked: {item.asked}, since {item.reason}; --rollout with --url asks a live engine")
    count = len(made.backends)
    print_line(f"Wrote {path} with {count} backend{'' if count == 1 else 's'}.")


def _compare(registry: Registry, asked: tuple[Asked, ...], path: Path, *, as_json: bool) -> None:
    held = HeldLock(read_lock(path), str(path))
    found = compare(held, registry, asked)
    skipped = tuple(f"{item.asked}: {item.reason}" for item in found.not_selected)
    if as_json:
        print_json(Compared(str(path), found.differences, skipped))
        raise typer.Exit(1 if found.differences else 0)
    for line in skipped:
        print_line(f"only its plugin was compared: {line}")
    if found.differences:
        refuse(held, registry, found.differences, found.different)
    print_line(f"What is selected here is what {path} names.")
