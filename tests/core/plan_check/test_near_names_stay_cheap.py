"""A wrong prefix makes every name a problem; telling it must not take hours."""

from __future__ import annotations

import time

from weightlane.messages import WireTensor
from weightlane.plan_check import check_against_expected
from weightlane.receiver import ExpectedTensor

LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_thousands_of_names_without_their_prefix_are_told_in_seconds_with_near_names_first() -> None:
    names = [
        f"layers.{layer}.mlp.{leaf}{expert}.weight"
        for layer in range(40)
        for leaf in LEAVES
        for expert in range(16)
    ]
    sent = [WireTensor(name, (2,), "float32") for name in names]
    expected = [ExpectedTensor(f"model.{name}", (2,)) for name in names]
    started = time.monotonic()
    problems = check_against_expected(sent, expected, receiver="engine")
    assert time.monotonic() - started < 60
    assert len(problems) == 2 * len(names)
    assert problems[0].near[0] == f"model.{names[0]}"
