"""The judgement of `told_apart.py`, on made-up runs: alike ones pass, slightly wrong ones do not."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


HERE = Path(__file__).parent


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports one of the modules beside this file, which are a program's and no package's, for one test."""
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (HERE / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture
def told_apart(program: Callable[[str], Any]) -> Any:
    return program("told_apart")


@dataclass(frozen=True)
class FakeSaid:
    """As `run_spread.Said`."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


def runs(
    count: int, seed: int, *, shift: float = 0.0, noise: float = 0.01, tokens: int = 100
) -> list[FakeSaid]:
    """Runs of one engine over one text: noise of its own around log-probs, all of them moved by `shift`."""
    generator = torch.Generator().manual_seed(seed)
    said = -8 + torch.randn(count, tokens, generator=generator) * noise + shift
    return [FakeSaid((tuple(range(tokens)),), (tuple(row.tolist()),)) for row in said]


def test_runs_that_are_alike_are_not_told_apart(told_apart: Any) -> None:
    told = [told_apart.compare(runs(32, 2 * seed), runs(32, 2 * seed + 1)) for seed in range(5)]
    assert not any(item.told_apart for item in told)
    assert sum(item.p for item in told) / len(told) == pytest.approx(0.5, abs=0.3)
    assert all(abs(item.energy) < 0.05 * item.across for item in told)


def test_the_largest_difference_of_all_pairs_would_have_failed_runs_that_are_alike(
    program: Callable[[str], Any],
) -> None:
    """The judgement that this one replaces: 66 pairs within either engine, 144 across."""
    spread = program("run_spread")
    failed = 0
    for seed in range(10):
        mine, other = runs(12, 2 * seed), runs(12, 2 * seed + 1)
        own = max(spread.spread_of(mine), spread.spread_of(other))
        failed += max(spread.largest_difference(one, two) for one in mine for two in other) > own
    assert failed > 2


def test_a_shift_of_half_of_the_noise_is_told_apart(told_apart: Any) -> None:
    told = told_apart.compare(runs(32, 1), runs(32, 2, shift=0.005))
    assert told.told_apart
    assert told.shift > 0.005


def test_runs_of_another_spread_are_told_apart(told_apart: Any) -> None:
    assert told_apart.compare(runs(32, 1), runs(32, 2, noise=0.015)).told_apart


def test_equal_runs_are_alike_and_runs_that_are_equal_among_themselves_alone_are_not(told_apart: Any) -> None:
    alike = told_apart.compare(runs(8, 1, noise=0.0), runs(8, 2, noise=0.0))
    assert (alike.p, alike.energy, alike.shift) == (1.0, 0.0, 0.0)
    other = told_apart.compare(runs(8, 1, noise=0.0), runs(8, 2, noise=0.0, shift=1e-3))
    assert other.told_apart
    assert other.own == (0.0, 0.0)
    assert other.across == pytest.approx(1e-3, rel=1e-3)


def test_too_few_runs_to_tell_anything_apart_are_refused(told_apart: Any) -> None:
    with pytest.raises(ValueError, match="6 and 6 runs can never be told apart"):
        told_apart.compare(runs(6, 1), runs(6, 2, shift=1.0))


def test_what_comes_after_a_token_that_differs_is_left_out_and_that_token_is_not(told_apart: Any) -> None:
    one = FakeSaid(((1, 2, 3), (4, 5, 6)), ((-1.0, -2.0, -3.0), (-4.0, -5.0, -6.0)))
    two = FakeSaid(((1, 9, 8), (4, 5, 6)), ((-1.0, -2.5, -7.0), (-4.0, -5.0, -6.0)))
    expected = [[-1.0, -2.0, -4.0, -5.0, -6.0], [-1.0, -2.5, -4.0, -5.0, -6.0]]
    assert told_apart.vectors([one, two]).tolist() == expected


def test_engines_that_never_say_one_token_alike_are_told_apart(told_apart: Any) -> None:
    """A control: were the token that differs left out too, nothing would be compared, and nothing seen."""
    one = [FakeSaid(((1, 2),), ((-1.0, -2.0),))] * 8
    two = [FakeSaid(((3, 4),), ((-1.5, -2.0),))] * 8
    told = told_apart.compare(one, two)
    assert told.tokens == 1
    assert told.told_apart


def test_a_difference_counts_as_none_only_beside_a_wrong_one_ten_times_as_large(told_apart: Any) -> None:
    mine = runs(32, 1)
    alike = told_apart.compare(mine, runs(32, 2))
    slight = told_apart.compare(mine, runs(32, 3, shift=0.004))
    wrong = told_apart.compare(mine, runs(32, 4, shift=0.05))
    assert slight.told_apart
    assert told_apart.as_good_as(alike, wrong)
    assert told_apart.as_good_as(slight, wrong)
    assert not told_apart.as_good_as(slight, told_apart.compare(mine, runs(32, 5, shift=0.005)))
    assert not told_apart.as_good_as(wrong, wrong)
    assert not told_apart.as_good_as(alike, alike), "a control that is not seen proves nothing"
