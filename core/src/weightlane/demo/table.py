"""The live table of a run in a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from weightlane.demo.settings import LIMITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from weightlane.demo.messages import Connected, StepReport
    from weightlane.demo.session import Record


_HEADS = (
    "step",
    "reward",
    "",
    "MB",
    "sync ms",
    "rollout_\nprobs_\ndiff_mean",
    "rollout_actor_\nprobs_pearson_\ncorr",
    "served",
)


class SilentView:
    """Shows nothing, for `--json`."""

    def status(self, text: str) -> None:
        """Nothing."""

    def connected(self, connected: Connected) -> None:
        """Nothing."""

    def step(self, step: StepReport) -> None:
        """Nothing."""


class TableView:
    """A table that grows by a row a step, under a line that says what is going on.

    Where the output is no terminal, the line is printed each time it changes and the table once, at the end.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots", Text(""))
        self._steps: list[StepReport] = []
        self._live = Live(console=console, refresh_per_second=8)
        self._status = ""

    @contextmanager
    def shown(self) -> Iterator[TableView]:
        """The view, live until the block ends; then the table stays and the line goes."""
        with self._live:
            try:
                yield self
            finally:
                self._live.update(step_table(self._steps) if self._steps else Text(""))

    def status(self, text: str) -> None:
        """Changes the line."""
        if text == self._status:
            return
        self._status = text
        if not self._console.is_terminal and not text.startswith("step "):
            self._console.print(f"{text} ...", markup=False, highlight=False)
        self._spinner.update(text=Text(f" {text}", style="dim"))
        self._refresh()

    def connected(self, connected: Connected) -> None:
        """Prints the plan above the table."""
        model = f"{connected.architecture}, {connected.parameters:,} parameters"
        self._console.print(f"[bold]Model[/] {escape(model)}\n[bold]Plan[/]", highlight=False)
        self._console.print(connected.plan, markup=False, highlight=False, soft_wrap=True)
        self._console.print()

    def step(self, step: StepReport) -> None:
        """Adds a row."""
        self._steps.append(step)
        self._refresh()

    def _refresh(self) -> None:
        parts: list[RenderableType] = [step_table(self._steps)] if self._steps else []
        self._live.update(Group(*parts, self._spinner), refresh=True)


def step_table(steps: list[StepReport]) -> Table:
    """One row a step; figures beyond the limits are red."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in _HEADS:
        table.add_column(head, justify="right" if head else "left", no_wrap=True, vertical="bottom")
    for step in steps:
        fresh = step.rollout_versions == (step.trainer_version,)
        table.add_row(
            str(step.step),
            f"{step.reward:.3f}",
            Text(_bar(step.reward), style="green"),
            "-" if step.nbytes is None else f"{step.nbytes / 1e6:.2f}",
            "-" if step.sync_seconds is None else f"{step.sync_seconds * 1e3:.0f}",
            _judged(f"{step.probs_diff_mean:.1e}", good=step.probs_diff_mean <= LIMITS.probs_diff_mean),
            _judged(_pearson(step.pearson), good=step.pearson is not None and step.pearson >= LIMITS.pearson),
            _judged(_served(step), good=fresh),
        )
    return table


def print_verdict(console: Console, record: Record, report: str) -> None:
    """The closing check, the verdict with its reasons, and where the report lies."""
    console.print()
    closing = record.closing
    if record.steps:
        console.print(
            f"reward: {record.steps[0].reward:.3f} to {record.steps[-1].reward:.3f}", highlight=False
        )
    if closing:
        matching = closing.greedy_tokens - closing.greedy_differing
        console.print(
            f"closing check: {matching} of {closing.greedy_tokens} greedy tokens are the trainer's own, "
            f"log-probs within {closing.logprob_diff_max:.1e}",
            highlight=False,
            soft_wrap=True,
        )
    style = "bold green" if record.verdict.passed else "bold red"
    console.print(f"[{style}]{record.verdict.word}[/] in {record.seconds:.0f} s", highlight=False)
    for reason in record.verdict.reasons:
        console.print(f"- {reason}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {escape(report)}", highlight=False, soft_wrap=True)


def _judged(text: str, *, good: bool) -> Text:
    return Text(text, style="" if good else "red")


def _pearson(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.6f}"


def _served(step: StepReport) -> str:
    """The version that the samples came from, and the trainer's where it is another."""
    served = ", ".join("?" if version is None else f"v{version}" for version in step.rollout_versions)
    return (
        served
        if step.rollout_versions == (step.trainer_version,)
        else f"{served}, not v{step.trainer_version}"
    )


def _bar(share: float, width: int = 6) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "░" * (width - filled)
