"""The report's figures, as SVG to be put into a page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from weightlane.demo.settings import LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.demo.messages import LastProbs, StepReport

_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _RED, _GREEN, _AMBER = "#2563eb", "#dc2626", "#059669", "#d97706"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_SIZE = (5.2, 3.1)  # inches; the page scales them
_LEAST_SHOWN = 1e-9
_INSTANT_MS = 0.1


def reward_plot(steps: Sequence[StepReport]) -> str:
    """Mean reward of each step's samples."""

    def draw(axes: Any) -> None:
        numbers = [step.step for step in steps]
        axes.plot(numbers, [step.reward for step in steps], marker="o", color=_BLUE)
        axes.axhline(0.5, color=_FAINT, linewidth=1, linestyle=":")
        axes.text(numbers[-1], 0.485, "one half", color=_FAINT, ha="right", va="top", fontsize=9)
        axes.set(xlabel="step", ylabel="share of even tokens", ylim=(0, 1.04))

    return _figure("reward", draw)


def diff_plot(steps: Sequence[StepReport]) -> str:
    """Mean and largest difference of probabilities, on a logarithmic axis, with the limit."""

    def draw(axes: Any) -> None:
        numbers = [step.step for step in steps]
        means = [max(step.probs_diff_mean, _LEAST_SHOWN) for step in steps]
        largest = [max(step.probs_diff_max, _LEAST_SHOWN) for step in steps]
        axes.axhline(
            LIMITS.probs_diff_mean, color=_RED, linewidth=1.2, linestyle="--", label="limit of the mean"
        )
        axes.plot(numbers, largest, color=_FAINT, linewidth=1.2, marker=".", label="largest")
        axes.plot(numbers, means, color=_BLUE, marker="o", label="mean")
        axes.set_yscale("log")
        axes.set(xlabel="step", ylabel="|p rollout - p trainer|")
        axes.set_ylim(min(means) / 4, max([*largest, LIMITS.probs_diff_mean]) * 30)
        axes.legend(loc="upper left", ncols=3, fontsize=9, handlelength=1.5, columnspacing=1.2)

    return _figure("diff", draw)


def probs_plot(probs: LastProbs) -> str:
    """Every sampled token of the last step: the engine's probability against the trainer's."""

    rollout = [max(value, _LEAST_SHOWN) for value in probs.rollout]
    actor = [max(value, _LEAST_SHOWN) for value in probs.actor]

    def draw(axes: Any) -> None:
        least = min(*rollout, *actor) / 2
        axes.set(xscale="log", yscale="log", xlim=(least, 2), ylim=(least, 2))
        axes.plot([least, 1], [least, 1], color=_FAINT, linewidth=1, linestyle=":", zorder=1)
        axes.scatter(rollout, actor, s=16, color=_BLUE, alpha=0.4, linewidths=0, zorder=2)
        axes.set(xlabel="p rollout (as sampled)", ylabel="p trainer (recomputed)")

    return _figure("probs", draw)


def sync_plot(steps: Sequence[StepReport]) -> str:
    """Milliseconds and megabytes of each sync."""
    synced = [
        (step.step, step.sync_seconds * 1e3, step.nbytes / 1e6)
        for step in steps
        if step.sync_seconds is not None and step.nbytes is not None
    ]

    def draw(axes: Any) -> None:
        numbers = [number for number, _, _ in synced]
        axes.bar(
            numbers, [milliseconds for _, milliseconds, _ in synced], color=_GREEN, width=0.6, label="ms"
        )
        axes.set(xlabel="step", ylabel="ms per sync", xlim=(steps[0].step - 0.6, steps[-1].step + 0.6))
        axes.set_ylim(0, 1.3 * max(_INSTANT_MS, *(milliseconds for _, milliseconds, _ in synced)))
        right = axes.twinx()
        right.grid(visible=False)
        right.spines["right"].set_visible(True)
        right.plot(numbers, [size for _, _, size in synced], color=_AMBER, marker="o", label="MB")
        right.set_ylabel("MB per sync")
        right.set_ylim(0, 1.3 * max(size for _, _, size in synced))
        handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
        axes.legend(handles, ["ms", "MB"], loc="upper left", ncols=2, fontsize=9, handlelength=1.5)

    return _figure("sync", draw)


def _figure(name: str, draw: Any) -> str:
    """One SVG element without an XML head. `name` keeps the ids of several figures in a page apart."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw(axes)
        if name != "probs":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    return text[text.index("<svg") :]
