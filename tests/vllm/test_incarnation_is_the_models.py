from __future__ import annotations

from types import SimpleNamespace

import torch

from weightlane_vllm.loaded_models import LoadedModels, incarnation_of


def test_one_model_has_one_incarnation_and_another_model_another() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert incarnation_of(model) == incarnation_of(model)
    assert incarnation_of(model) != incarnation_of(other)


def test_a_drafter_that_is_made_anew_is_another_incarnation() -> None:
    model, first, second = (torch.nn.Linear(2, 2) for _ in range(3))
    runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: None)
    models = LoadedModels(SimpleNamespace(model_runner=runner))
    assert models.incarnation == incarnation_of(model)
    runner.get_draft_model = lambda: first
    before = models.incarnation
    assert before == models.incarnation != incarnation_of(model)
    runner.get_draft_model = lambda: second
    assert models.incarnation != before
