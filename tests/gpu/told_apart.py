"""Whether runs of one engine can be told from runs of another, when no two runs of one engine are alike.

vLLM's LoRA kernels add partial sums in the order in which they come ready (split-K with atomics), so one
engine says other log-probs each time. The largest of all differences grows with the number of pairs that are
looked at, hence says nothing. Here the runs are points, one coordinate a token, and what is measured is the
energy distance of the two clouds (Székely and Rizzo): the mean distance across, twice, less those within
either one. How often as much comes of labels dealt anew tells whether it is chance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import comb
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from run_spread import Said

DEALS = 9999
ALPHA = 0.001
MARGIN = 0.1


@dataclass(frozen=True)
class Comparison:
    """Of two groups of runs; distances are root mean squares over the tokens, in nats.

    Args:
        runs: Of the one group and of the other.
        tokens: That were compared in every run.
        own: Mean distance between two runs of the one group, and of the other.
        across: Mean distance between a run of the one and one of the other.
        energy: What `across`, twice, has over both of `own`; about 0 when the groups are alike.
        shift: Largest difference, at any token, of the groups' mean log-probs.
        p: Share of deals of the labels that give at least this energy.
    """

    runs: tuple[int, int]
    tokens: int
    own: tuple[float, float]
    across: float
    energy: float
    shift: float
    p: float

    @property
    def told_apart(self) -> bool:
        """Whether chance is ruled out."""
        return self.p <= ALPHA

    def told(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def compare(ours: Sequence[Said], theirs: Sequence[Said]) -> Comparison:
    """Compares the groups.

    Raises:
        ValueError: There are so few runs that even groups without anything in common could not be told apart.
    """
    if 2 / comb(len(ours) + len(theirs), len(ours)) > ALPHA / 2:
        raise ValueError(f"{len(ours)} and {len(theirs)} runs can never be told apart at {ALPHA}: run more")
    points = vectors([*ours, *theirs])
    first = torch.zeros(len(points), dtype=torch.bool)
    first[: len(ours)] = True
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    distances /= max(points.shape[1], 1) ** 0.5
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(DEALS, len(points), generator=generator).argsort(dim=1)
    found, (own, other, across) = _energies(distances, first[None])
    dealt, _ = _energies(distances, first[order])
    as_much = int((dealt >= found - 1e-12).sum())
    shift = (points[first].mean(0) - points[~first].mean(0)).abs()
    return Comparison(
        runs=(len(ours), len(theirs)),
        tokens=points.shape[1],
        own=(float(own), float(other)),
        across=float(across),
        energy=float(found),
        shift=float(shift.max()) if len(shift) else 0.0,
        p=(1 + as_much) / (1 + DEALS),
    )


def vectors(runs: Sequence[Said]) -> torch.Tensor:
    """Each run as a row of log-probs: of all tokens up to and with the first at which any run differs.

    That one is kept: it is each run's likeliest token, whose log-prob moves little when two are nearly as
    likely, and much when the weights are others. What comes after answers another text.

    Returns:
        `[runs, tokens]` of float64.
    """
    columns = []
    for row in range(len(runs[0].tokens)):
        for column in range(len(runs[0].tokens[row])):
            columns.append([run.logprobs[row][column] for run in runs])
            if len({run.tokens[row][column] for run in runs}) > 1:
                break
    return torch.tensor(columns, dtype=torch.float64).reshape(-1, len(runs)).T.contiguous()


def as_good_as(right: Comparison, wrong: Comparison) -> bool:
    """Whether `right` is no difference, or one that is nothing beside `wrong`'s, which is one for certain.

    The second half is there because runs of two processes need not be alike even with the same weights: the
    order of the partial sums is a matter of timing, and of the adapter's slot.
    """
    return wrong.told_apart and (not right.told_apart or right.energy <= MARGIN * wrong.energy)


def _energies(
    distances: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each row of labels: the energy, and the mean distances within the first, the second, and across."""
    ours = first.to(distances.dtype)
    theirs = 1 - ours
    count, others = ours.sum(1), theirs.sum(1)
    own = ((ours @ distances) * ours).sum(1) / (count * (count - 1))
    other = ((theirs @ distances) * theirs).sum(1) / (others * (others - 1))
    across = ((ours @ distances) * theirs).sum(1) / (count * others)
    return 2 * across - own - other, (own, other, across)
