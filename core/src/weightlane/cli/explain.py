"""`weightlane explain`: why one name goes where it goes, asked from either side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weightlane.cli import FAILED, WELL
from weightlane.cli.absent_engine import AbsentEngine, look_at_snapshot
from weightlane.cli.output import print_json, print_line
from weightlane.cli.plan import look_at
from weightlane.cli.receiver_options import (
    Architecture,
    Engine,
    Fresh,
    Lora,
    Model,
    TensorParallel,
    To,
    require_one_receiver,
    tables_of,
)
from weightlane.notices import quiet_plugins
from weightlane.registry import get_registry
from weightlane.trace.explain import explain
from weightlane.trace.explanation import EVERY_WORKER, Explanation, Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.cli.receiver_look import Look

app = typer.Typer(add_completion=False)

_WELL = frozenset({"placed", "dropped", "owned"})


class Explained(msgspec.Struct, frozen=True):
    """What `explain --json` prints. `basis` and `coverage` are those of `plan --json`."""

    receiver: str
    basis: str
    coverage: str
    reason: str
    answer: Explanation


@app.command("explain")
def explain_name(
    name: Annotated[
        str, typer.Argument(help="A tensor of the checkpoint or of the receiver, or a LoRA matrix.")
    ],
    model: Model = None,
    to: To = "",
    engine: Engine = "",
    tp: TensorParallel = 1,
    lora: Lora = False,
    arch: Architecture = "",
    fresh: Fresh = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Tell where one tensor comes from or goes to, by which rule, and what must travel with it.

    NAME may be of either side; for a misspelt one, near names are told. The receiver is named as for plan;
    with --arch instead of --model, the snapshot of the engine's version answers alone. Exit status 0: it is
    placed, or rightly left out. Exit status 1: it is not, or nobody knows the name. Exit status 2: wrong
    usage, or the command itself broke.
    """
    require_one_receiver(engine, to, tensor_parallel=tp, lora=lora)
    if (model is None) == (not arch):
        raise typer.BadParameter("give --model DIR, or --arch NAME instead", param_hint="--model")
    if arch and to:
        raise typer.BadParameter(
            "a live engine is asked about a checkpoint: give --model", param_hint="--arch"
        )
    if arch and fresh:
        raise typer.BadParameter(
            "a snapshot is read and nothing is built: give --model", param_hint="--fresh"
        )
    tables, wish = tables_of(to, fresh=fresh), AbsentEngine(engine, tp, lora)
    with quiet_plugins():
        if model is None:
            look = look_at_snapshot(get_registry(), wish, arch)
        else:
            look = look_at(model, to, wish, tables)
    answer = explain(name, look.known())
    if as_json:
        print_json(Explained(look.receiver, look.basis, look.coverage, look.reason, answer))
    else:
        for line in tree_of(answer, look):
            print_line(line)
    raise typer.Exit(WELL if answer.verdict in _WELL else FAILED)


_TITLES = {
    "checkpoint": "a checkpoint tensor",
    "receiver": "a tensor of the receiver",
    "lora": "a LoRA matrix",
    "unknown": "unknown",
}


def tree_of(answer: Explanation, look: Look) -> Iterator[str]:
    """The answer for people, the most important line first."""
    yield f"{answer.name}: {_TITLES[answer.kind]}, {answer.verdict.replace('-', ' ')}"
    branches: list[tuple[str, list[str]]] = [(sentence, []) for sentence in answer.says]
    why = [look.reason] if look.reason else []
    branches.append(
        (f"receiver: {look.receiver}, {look.basis}, coverage {look.coverage}", [*why, *look.notes])
    )
    if answer.rule:
        branches.append((f"decided by: {answer.rule}", []))
    if answer.routes:
        more = [f"and {answer.more_routes} more; --json has the count"] if answer.more_routes else []
        branches.append(("elements", [*map(_route, answer.routes), *more]))
    if answer.near:
        branches.append(("near", list(answer.near)))
    for number, (text, leaves) in enumerate(branches):
        last = number == len(branches) - 1
        yield f"{'└─' if last else '├─'} {text}"
        for place, leaf in enumerate(leaves):
            end = "└─" if place == len(leaves) - 1 else "├─"
            yield f"{'  ' if last else '│ '} {end} {leaf}"


def _route(route: Route) -> str:
    order = f", {route.order}" if route.order else ""
    casts = f", cast to {' then '.join(route.casts)}" if route.casts else ""
    worker = "every worker" if route.worker == EVERY_WORKER else f"worker {route.worker}"
    return f"{worker}: {route.source} {route.taken} -> {route.target} {route.put}{order}{casts}"
