"""`weightlane demo`: a small model learns by reward while its weights are synced to a rollout engine."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from weightlane.cli import FAILED, WELL
from weightlane.cli.locked import Locked, held_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from weightlane.demo.session import Record
    from weightlane.demo.settings import DemoSettings

DEFAULT_REPORT = Path("weightlane-demo.html")
_INTERRUPTED = 130

app = typer.Typer(add_completion=False)


@app.command("demo")
def demo(
    trainer: Annotated[str, typer.Option(help="Training engine: torch, fsdp or megatron.")] = "torch",
    rollout: Annotated[str, typer.Option(help="Rollout engine: reference, vllm or sglang.")] = "reference",
    rollout_python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Interpreter of the environment that holds the rollout engine."),
    ] = None,
    url: Annotated[str, typer.Option(help="Use the engine that runs at this address; needs --model.")] = "",
    mode: Annotated[
        str, typer.Option(help="What to sync: full, or LoRA merged into its base or alone (adapter).")
    ] = "full",
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint folder to begin from, instead of a tiny random model."),
    ] = None,
    steps: Annotated[int, typer.Option(min=3, max=1000, help="Training steps.")] = 10,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Sync only once, and see the rollout go stale.")
    ] = False,
    report: Annotated[
        Path, typer.Option(metavar="PATH", help="Where to write the HTML report.")
    ] = DEFAULT_REPORT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
    locked: Locked = None,
) -> None:
    """Train a small model by reward for a few steps, syncing it to a rollout engine before each.

    Two trainer ranks and the engine run as processes of their own. Exit status 0 for PASS; 1 for FAIL, and
    when the demo cannot run as asked; 2 for wrong usage; 130 when interrupted.
    """
    from weightlane.demo.settings import DemoSettings

    settings = DemoSettings(
        trainer=trainer,
        rollout=rollout,
        mode=mode,
        model=model,
        rollout_python=rollout_python.absolute() if rollout_python else None,
        url=url,
        steps=steps,
        sync_each_step=not no_sync,
        report=report.absolute(),
    )
    try:
        with _signals_end_it(), held_lock(locked):
            record = _show_json(settings) if as_json else _show_table(settings)
    except KeyboardInterrupt:
        _print_interrupted(as_json=as_json)
        raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(WELL if record.verdict.passed else FAILED)


def _show_table(settings: DemoSettings) -> Record:
    from rich.console import Console

    from weightlane.demo.preflight import check_settings
    from weightlane.demo.report import write_report
    from weightlane.demo.session import run_demo
    from weightlane.demo.table import TableView, print_verdict

    check_settings(settings)
    console = Console()
    with TableView(console).shown() as view:
        record = run_demo(settings, view)
    write_report(record, settings.report)
    print_verdict(console, record, str(settings.report))
    return record


def _show_json(settings: DemoSettings) -> Record:
    from weightlane.cli.output import print_json
    from weightlane.demo.document import document_of
    from weightlane.demo.preflight import check_settings
    from weightlane.demo.report import write_report
    from weightlane.demo.session import run_demo
    from weightlane.demo.table import SilentView

    check_settings(settings)
    record = run_demo(settings, SilentView())
    write_report(record, settings.report)
    print_json(document_of(record))
    return record


def _print_interrupted(*, as_json: bool) -> None:
    what = "Interrupted; every process of the demo was ended."
    typer.echo(what, err=True)
    if as_json:
        from weightlane.cli.output import print_json

        print_json({"error": {"type": "KeyboardInterrupt", "what": what, "why": "", "fix": ""}})


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run; more of them cannot keep it from ending its processes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
