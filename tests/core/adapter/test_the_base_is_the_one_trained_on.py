"""Digests of values: equal across exact widening, different for any other value, shape or dtype."""

from __future__ import annotations

import torch

from weightlane.base_digest import base_problems, value_digest


def test_a_checkpoint_kept_in_bfloat16_equals_its_widened_self() -> None:
    narrow = torch.randn(5, 7).bfloat16()
    assert value_digest(narrow) == value_digest(narrow.float())
    assert value_digest(narrow.half()) == value_digest(narrow.half().float())
    assert value_digest(narrow.T) == value_digest(narrow.T.contiguous())


def test_anything_else_differs() -> None:
    plain = torch.randn(4, 6)
    one_off = plain.clone()
    one_off[3, 5] += 1e-6
    others = (one_off, plain.reshape(6, 4), plain.double(), plain.bfloat16(), torch.arange(24).reshape(4, 6))
    assert value_digest(plain) not in {value_digest(other) for other in others}
    assert value_digest(torch.zeros(0, 3)) != value_digest(torch.zeros(0, 4))
    assert value_digest(torch.tensor(True)) != value_digest(torch.tensor(False))


def test_every_kind_of_difference_is_named() -> None:
    trained_on = {"a.weight": "1", "b.weight": "2", "gone.weight": "3"}
    held = {"a.weight": "1", "b.weight": "9", "gome.weight": "3", "head.weight": "1"}
    problems = base_problems(trained_on, held, {"head.weight": "a.weight"}, receiver="the engine")
    assert [(problem.subject, problem.near[:1]) for problem in problems] == [
        ("gome.weight", ("gone.weight",)),
        ("gone.weight", ("gome.weight",)),
        ("b.weight", ()),
    ]
    assert base_problems(trained_on, dict(trained_on), {}, receiver="the engine") == []
    assert base_problems({}, held, {}, receiver="the engine")[0].subject == "base"
