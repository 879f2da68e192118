from __future__ import annotations

import random

import numpy as np
import pytest

from weightlane.demo.metrics import agreement, pearson


def test_differences_of_known_values() -> None:
    found = agreement([0.1, 0.5, 0.9], [0.2, 0.5, 0.6])
    assert found.diff_mean == pytest.approx(0.4 / 3)
    assert found.diff_max == pytest.approx(0.3)


def test_correlation_is_numpys() -> None:
    random.seed(0)
    first = [random.random() for _ in range(200)]
    second = [value + random.gauss(0, 0.2) for value in first]
    assert pearson(first, second) == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-12)


def test_correlation_has_the_right_sign() -> None:
    assert pearson([0.1, 0.2, 0.4], [0.1, 0.2, 0.4]) == 1.0
    assert pearson([0.1, 0.2, 0.4], [0.4, 0.3, 0.1]) == pytest.approx(-1.0)
    assert abs(pearson([0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]) or 0.0) < 1e-12


def test_a_side_that_does_not_vary_or_is_not_finite_has_no_correlation() -> None:
    assert pearson([0.5, 0.5, 0.5], [0.1, 0.2, 0.3]) is None
    assert pearson([0.1, 0.2], [0.1, float("nan")]) is None


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rollout and 1 actor"):
        agreement([0.1, 0.2], [0.1])
    with pytest.raises(ValueError, match="0 rollout"):
        agreement([], [])
