"""One forward pass over a given continuation tells whether it is the model's greedy one."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from weightlane.testing.greedy import greedy_choices, greedy_continuations

PROMPTS = [[1, 2, 3], [9, 4, 11, 17, 5], [30]]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def test_the_greedy_continuation_is_confirmed_with_its_log_probs(model: torch.nn.Module) -> None:
    greedy = greedy_continuations(model, PROMPTS, 6)
    choices = greedy_choices(model, PROMPTS, [item.token_ids for item in greedy])
    for one, other in zip(greedy, choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("place", range(6))
def test_control_another_token_at_any_place_is_not_confirmed(model: torch.nn.Module, place: int) -> None:
    given = list(greedy_continuations(model, PROMPTS[:1], 6)[0].token_ids)
    given[place] = (given[place] + 1) % 64
    (choice,) = greedy_choices(model, PROMPTS[:1], [given])
    assert choice.token_ids != tuple(given)
    assert (
        choice.token_ids[: place + 1]
        == tuple(greedy_continuations(model, PROMPTS[:1], 6)[0].token_ids)[: place + 1]
    )
