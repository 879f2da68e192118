from __future__ import annotations

from typing import Any

import pytest

from weightlane.errors import EngineError
from weightlane.messages import Generate
from weightlane.reference import generation
from weightlane.reference.engine import ReferenceEngine

PROMPTS = ((5, 6, 7), (9,), (3, 1, 4, 1, 5, 9, 2, 6), (8, 8, 8))


@pytest.fixture(scope="module", params=["untied_folder", "tied_folder"])
def engine(request: pytest.FixtureRequest) -> ReferenceEngine:
    return ReferenceEngine(request.getfixturevalue(request.param))


def plain_logprobs(model: Any, tokens: list[int]) -> Any:
    """Log-probs of every next token from one forward without a cache, the way a trainer computes them."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def test_greedy_tokens_and_logprobs_equal_a_forward_without_cache(engine: ReferenceEngine) -> None:
    answers = engine.generate(Generate(PROMPTS, 6)).generations
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logprobs = plain_logprobs(engine.model, [*prompt, *answer.token_ids])
        for step, token in enumerate(answer.token_ids):
            row = logprobs[len(prompt) + step - 1]
            assert int(row.argmax()) == token
            assert float(row[token]) == pytest.approx(answer.logprobs[step], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_rest_of_the_batch_does_not_matter(engine: ReferenceEngine, temperature: float) -> None:
    together = engine.generate(Generate(PROMPTS, 8, temperature, seed=3)).generations
    first = engine.generate(Generate(PROMPTS[:1], 8, temperature, seed=3)).generations[0]
    assert first.token_ids == together[0].token_ids
    assert first.logprobs == pytest.approx(together[0].logprobs, abs=1e-5)


def test_sampling_follows_the_seed_and_reports_the_models_own_logprobs(engine: ReferenceEngine) -> None:
    request = Generate(PROMPTS, 8, temperature=2.0, seed=1)
    answers = engine.generate(request).generations
    assert engine.generate(request).generations == answers
    assert engine.generate(Generate(PROMPTS, 8, temperature=2.0, seed=2)).generations != answers
    assert answers[0].token_ids != answers[3].token_ids, "prompts draw from streams of their own"
    tokens = [*PROMPTS[1], *answers[1].token_ids]
    logprobs = plain_logprobs(engine.model, tokens)
    for step, token in enumerate(answers[1].token_ids):
        assert float(logprobs[step, token]) == pytest.approx(answers[1].logprobs[step], abs=1e-5)


def test_sampled_frequencies_follow_the_probabilities(engine: ReferenceEngine) -> None:
    import torch

    draws = 400
    answers = engine.generate(Generate(((5, 6),) * draws, 1, temperature=1.0, seed=0)).generations
    probabilities = plain_logprobs(engine.model, [5, 6])[-1].exp()
    likely = int(probabilities.argmax())
    share = sum(answer.token_ids[0] == likely for answer in answers) / draws
    expected = float(probabilities[likely])
    assert abs(share - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5
    assert torch.isfinite(probabilities).all()


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Generate(((1, 512),), 1), "token id 512"),
        (Generate(((1,), ()), 1), "Prompt 1 is empty"),
        (Generate(((1,),), 0), "max_tokens is 0"),
        (Generate(((1,),), 1, -1.0), "temperature -1"),
    ],
)
def test_a_nonsensical_request_is_refused(engine: ReferenceEngine, request_: Generate, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        engine.generate(request_)


def test_a_folder_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(EngineError, match=f"cannot load {tmp_path}"):
        ReferenceEngine(str(tmp_path))


def test_a_continuation_that_is_too_short_is_an_error(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def one_token(model: Any, request: Generate, numbers: list[int]) -> tuple[Any, Any]:
        return torch.zeros(len(numbers), 1, dtype=torch.int64), torch.zeros(len(numbers), 1)

    monkeypatch.setattr(generation, "_continue_batch", one_token)
    with pytest.raises(EngineError, match="prompt 0 by 1 tokens with 1 log-probs, not by 2"):
        engine.generate(Generate(PROMPTS, 2))
