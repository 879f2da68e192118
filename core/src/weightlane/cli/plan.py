"""`weightlane plan`: where a checkpoint would land in an engine, and everything that speaks against it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weightlane.cli import FAILED, WELL
from weightlane.cli.absent_engine import AbsentEngine, look_at_absent
from weightlane.cli.output import print_json, print_line, print_lines, print_table
from weightlane.cli.receiver_options import (
    Engine,
    Fresh,
    Lora,
    TensorParallel,
    To,
    require_one_receiver,
    tables_of,
)
from weightlane.errors import Problem, UsageError
from weightlane.notices import quiet_plugins
from weightlane.receiver import NameEntry
from weightlane.registry import get_registry
from weightlane.trace.contract import ContractGroup, Line, Note, Refused
from weightlane.trace.contract_files import contract_name
from weightlane.trace.contract_making import contract_from_tables
from weightlane.trace.contract_text import contract_text, place_text
from weightlane.trace.figures import TraceFigures, figures_of

if TYPE_CHECKING:
    from weightlane.cli.built_tables import TablesOf
    from weightlane.cli.receiver_look import Look
    from weightlane.trace.contract import Contract

app = typer.Typer(add_completion=False)

_NOTHING_FOUND = {
    "proven": "No problem was found.",
    "assumed": "No problem was found.",
    "untraced": "No problem was found by names, shapes and dtypes; where elements land was not looked at.",
}
_MOST_PROBLEMS = 50
_MOST_DROPPED = 20


class Planned(msgspec.Struct, frozen=True):
    """What `plan --json` prints; `problems` are empty with exit status 0.

    `basis` tells what all rests on: `live engine`, `model built here`, `snapshot` or `static rules`. `lines`
    are the patterns of names, `entries` every name.
    """

    model: str
    architecture: str
    tensors: int
    nbytes: int
    receiver: str
    backend: str
    tensor_parallel: int
    lora: bool
    basis: str
    coverage: str
    reason: str
    style: str
    transport: str
    figures: TraceFigures | None
    lines: tuple[Line, ...]
    groups: tuple[ContractGroup, ...]
    owned: tuple[Note, ...]
    refused: tuple[Refused, ...]
    dropped: dict[str, str]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    entries: tuple[NameEntry, ...]
    written: str = ""


@app.command("plan")
def plan(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder; weights are not read.")],
    to: To = "",
    engine: Engine = "",
    tp: TensorParallel = 1,
    lora: Lora = False,
    contract_folder: Annotated[
        Path | None,
        typer.Option(
            "--write-contract",
            metavar="FOLDER",
            help="Write the contract snapshot to FOLDER/VERSION/NAME.txt.",
        ),
    ] = None,
    fresh: Fresh = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Tell where a checkpoint would land in an engine. Nothing is sent, written or published.

    With --to, a live engine runs its own loader without data and says where every element would go; a lane
    that is open meanwhile is left alone. With --engine alone, the engine's model is built here without data
    where the engine is installed; else the snapshot of its version answers, else static rules; the output
    says which. What a model that was built here has shown is kept below XDG_CACHE_HOME, or ~/.cache, and
    answers again for as long as the checkpoint's configuration and names, the layout and everything that is
    installed are the same; a contract is always written from a new trace.

    Exit status 0: no problem was found. Exit status 1: there are problems, all of them listed, or the engine
    cannot be asked. Exit status 2: wrong usage, or the command itself broke.
    """
    require_one_receiver(engine, to, tensor_parallel=tp, lora=lora)
    with quiet_plugins():
        tables = tables_of(to, fresh=fresh or (contract_folder is not None and not to))
        look = look_at(model, to, AbsentEngine(engine, tp, lora), tables)
    shown = look.shown
    written = str(write_contract(look, contract_folder)) if contract_folder is not None else ""
    if as_json:
        print_json(planned(look, shown, written))
    else:
        _print(look, shown, written)
    raise typer.Exit(FAILED if look.problems else WELL)


def look_at(model: Path, to: str, wish: AbsentEngine, tables: TablesOf) -> Look:
    """At the live engine at `to`, or where that is "" at one that does not run."""
    registry = get_registry()
    if to:
        from weightlane.cli.live_engine import engine_at, look_at_live

        return look_at_live(registry, wish.engine or engine_at(registry, to), to, model)
    return look_at_absent(registry, wish, model, tables)


def planned(look: Look, shown: Contract | None, written: str = "") -> Planned:
    """The document of `plan --json`."""
    if look.checkpoint is None:
        raise AssertionError("a plan is of a checkpoint")
    manifest = look.checkpoint.manifest
    return Planned(
        model=str(look.checkpoint.folder),
        architecture=look.checkpoint.architecture,
        tensors=len(manifest.tensors),
        nbytes=manifest.nbytes,
        receiver=look.receiver,
        backend=look.selected.reference,
        tensor_parallel=look.tensor_parallel,
        lora=look.lora,
        basis=look.basis,
        coverage=look.coverage,
        reason=look.reason,
        style=look.style,
        transport=look.transport,
        figures=figures_of(look.tables) if look.tables else None,
        lines=shown.lines if shown else (),
        groups=shown.groups if shown else (),
        owned=shown.owned if shown else (),
        refused=shown.refused if shown else (),
        dropped=dict(look.dropped),
        problems=look.problems,
        notes=look.notes,
        entries=look.entries,
        written=written,
    )


def write_contract(look: Look, folder: Path) -> Path:
    """Writes what a loader was seen to do with the whole checkpoint; gives the file.

    Raises:
        UsageError: no loader was run, or the plan has problems.
    """
    if not look.tables or look.problems:
        why = "it has problems" if look.problems else f"it rests on {look.basis}, and no loader was run"
        raise UsageError(
            "No contract was written.",
            f"A contract is what a loader was seen to do with a whole checkpoint; of this plan, {why}.",
            "Run the command without --write-contract to see all of it.",
        )
    shown = contract_from_tables(look.tables, look.dropped)
    name = contract_name(shown.architecture, shown.tensor_parallel, lora=shown.lora)
    path = folder / shown.engine_version / name
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(contract_text(shown), encoding="utf-8")
    os.replace(beside, path)  # noqa: PTH105 - a reader sees the old one or the new one
    return path


def _print(look: Look, shown: Contract | None, written: str) -> None:
    document = planned(look, shown)
    size = f"{document.tensors} tensors, {document.nbytes / 1e6:.1f} MB"
    print_line(f"{document.architecture or 'unknown architecture'} in {document.model}: {size}")
    layout = f"tensor parallel {look.tensor_parallel}, LoRA {'on' if look.lora else 'off'}"
    print_line(f"{look.receiver}, {layout}: {look.selected.reference}")
    reason = look.reason or str(document.figures or "")
    print_line(f"coverage {look.coverage}{': ' + reason if reason else ''}")
    if document.figures and look.reason:
        print_line(f"traced: {document.figures}")
    print_lines([f"transport {look.transport}"] if look.transport else [], 0)
    print_lines([f"note: {note}" for note in look.notes], 0)
    if shown is not None:
        _print_contract(shown)
    if look.dropped:
        print_line("\nnot sent")
        dropped = [f"{name}: {reason}" for name, reason in look.dropped.items()]
        print_lines(_cut(dropped, _MOST_DROPPED), 2)
    if not look.problems:
        print_line(f"\n{_NOTHING_FOUND[look.coverage]}")
    else:
        count = len(look.problems)
        print_line(f"\n{count} problem{'' if count == 1 else 's'}")
        print_lines(_cut([str(problem) for problem in look.problems], _MOST_PROBLEMS), 2)
    print_lines([f"Wrote {written}."] if written else [], 0)


def _print_contract(shown: Contract) -> None:
    rows: list[tuple[str, str, str]] = []
    for line in shown.lines:
        name = line.source + (f" as {line.wire}" if line.wire != line.source else "")
        layers = "" if line.layers == "all" else f", layers {line.layers}"
        rows += [(name, place.target, place_text(place) + layers) for place in line.places]
        if not line.places:
            rows.append((name, "nothing", line.dropped + layers))
    print_line("")
    print_table((f"checkpoint name ({shown.style})", "receiver tensor", "place"), rows)
    for title, lines in (
        (
            "packed: what is sent into one of these must come whole, in one sync",
            [f"{group.target} of {', '.join(group.sources)}" for group in shown.groups],
        ),
        ("left to the engine", [f"{note.target}: {note.what}" for note in shown.owned]),
        ("not placed plainly", [f"{item.kind}: {', '.join(item.names)}" for item in shown.refused]),
    ):
        if lines:
            print_line(f"\n{title}")
            print_lines(lines, 2)


def _cut(lines: list[str], most: int) -> list[str]:
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"and {more} more; --json lists all"]
