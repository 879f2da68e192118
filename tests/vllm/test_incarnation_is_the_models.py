from __future__ import annotations

import torch

from weightlane_vllm.worker import incarnation_of


def test_one_model_has_one_incarnation_and_another_model_another() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert incarnation_of(model) == incarnation_of(model)
    assert incarnation_of(model) != incarnation_of(other)
