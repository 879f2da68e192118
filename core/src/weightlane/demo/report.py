"""The HTML report of a run: one file that needs nothing else."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane import __version__
from weightlane.demo.plots import diff_plot, probs_plot, reward_plot, sync_plot
from weightlane.demo.settings import LIMITS, RANKS

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.demo.messages import StepReport
    from weightlane.demo.session import Record


@dataclass(frozen=True, slots=True)
class Figure:
    """One plot; `svg` is markup of our own making, the rest is text."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `stale` and the like mark cells beyond the limits."""

    step: int
    reward: str
    reward_percent: int
    nbytes: str
    sync_ms: str
    diff: str
    diff_is_bad: bool
    pearson: str
    pearson_is_bad: bool
    served: str
    is_stale: bool


def write_report(record: Record, path: Path) -> None:
    """Writes the report of a run to `path`, replacing what is there."""
    path.write_text(render_report(record), encoding="utf-8")


def render_report(record: Record) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("weightlane.demo"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page: str = environment.get_template("report.html").render(
        record=record,
        settings=record.settings,
        connected=record.connected,
        verdict=record.verdict,
        closing=record.closing,
        limits=LIMITS,
        ranks=RANKS,
        rows=[_row(step) for step in record.steps],
        figures=_figures(record),
        version=__version__,
        python=platform.python_version(),
    )
    return page


def _figures(record: Record) -> list[Figure]:
    if not record.steps:
        return []
    figures = [
        Figure("Reward", "Mean over the tokens that the rollout engine sampled.", reward_plot(record.steps)),
        Figure(
            "Difference of probabilities",
            "Of the sampled tokens: the engine's probability against the trainer's own, recomputed.",
            diff_plot(record.steps),
        ),
    ]
    if record.probs.rollout:
        caption = "Each point is a sampled token of the last step; on the line both sides agree."
        figures.append(Figure("Probabilities, last step", caption, probs_plot(record.probs)))
    if any(step.nbytes is not None for step in record.steps):
        caption = "From the call on the controller until every worker had verified the weights."
        figures.append(Figure("Sync", caption, sync_plot(record.steps)))
    return figures


def _row(step: StepReport) -> Row:
    pearson = step.pearson
    served = ", ".join("unknown" if number is None else str(number) for number in step.rollout_versions)
    return Row(
        step=step.step,
        reward=f"{step.reward:.3f}",
        reward_percent=round(100 * step.reward),
        nbytes="–" if step.nbytes is None else f"{step.nbytes / 1e6:.2f}",  # noqa: RUF001 - a dash is meant
        sync_ms="–" if step.sync_seconds is None else f"{step.sync_seconds * 1e3:.0f}",  # noqa: RUF001
        diff=f"{step.probs_diff_mean:.1e}",
        diff_is_bad=not step.probs_diff_mean <= LIMITS.probs_diff_mean,
        pearson="undefined" if pearson is None else f"{pearson:.6f}",
        pearson_is_bad=pearson is None or pearson < LIMITS.pearson,
        served=served,
        is_stale=step.rollout_versions != (step.trainer_version,),
    )
