"""Generation with log-probs, independent of what else is in the batch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.generation_lengths import require_lengths
from weightlane.messages import Generate, Generation, Generations

if TYPE_CHECKING:
    from torch import Tensor


def generate_tokens(model: Any, request: Generate, *, version: int | None) -> Generations:
    """Continues every prompt by exactly `max_tokens` tokens; an end-of-text token does not stop it.

    Prompts of one length run as one batch and are never padded, so that neither masks nor position offsets
    can differ from an unbatched run. Log-probs are those of the model itself, `log_softmax` of the
    logits in fp32, whatever the temperature. Sampling draws each prompt's tokens from a stream of
    its own (seed and position in the request), so that the batch does not matter there either.

    Args:
        model: a transformers causal language model in eval mode.
        request: token ids, `max_tokens` >= 1, temperature >= 0 (0: greedy).
        version: stamped on every generation.

    Raises:
        EngineError: an empty prompt, a token outside the vocabulary, a nonsensical bound, or a
            continuation of another length.
    """
    import torch

    _check(request, vocabulary=int(model.config.get_text_config().vocab_size))
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(request.prompts):
        groups.setdefault(len(prompt), []).append(number)
    done: dict[int, Generation] = {}
    with torch.inference_mode():
        for numbers in groups.values():
            tokens, logprobs = _continue_batch(model, request, numbers)
            for row, number in enumerate(numbers):
                done[number] = Generation(tuple(tokens[row].tolist()), tuple(logprobs[row].tolist()), version)
    generations = tuple(done[number] for number in range(len(request.prompts)))
    require_lengths(generations, request.max_tokens, engine="The reference engine")
    return Generations(generations)


def _continue_batch(model: Any, request: Generate, numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Token ids and log-probs, each (prompts, max_tokens), for prompts of equal length."""
    import torch

    keyword = cache_keyword(model)
    streams = [_stream(request.seed, number) for number in numbers]
    inputs = torch.tensor([request.prompts[number] for number in numbers], device=model.device)
    cache: Any = None
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for _ in range(request.max_tokens):
        output = model(input_ids=inputs, use_cache=True, **{keyword: cache})
        cache = output[keyword]
        scores = output.logits[:, -1, :].float()
        chosen = _choose(scores, request.temperature, streams)
        tokens.append(chosen)
        logprobs.append(scores.log_softmax(-1).gather(-1, chosen[:, None])[:, 0])
        inputs = chosen[:, None]
    return torch.stack(tokens, 1), torch.stack(logprobs, 1)


def cache_keyword(model: Any) -> str:
    """Under which name this model takes and gives its key-value cache.

    `past_key_values` until transformers 5.2x, `cache` since; the old name warns before it goes.

    Raises:
        EngineError: neither; a model with another kind of state cannot be driven step by step here.
    """
    parameters = inspect.signature(model.forward).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in parameters:
            return keyword
    raise EngineError(
        f"{type(model).__name__} takes no key-value cache.",
        f"Its forward takes {', '.join(parameters)}.",
        "The reference engine drives attention models only; use another engine.",
    )


def _choose(scores: Tensor, temperature: float, streams: list[Any]) -> Tensor:
    """One token per row of `scores` (prompts, vocabulary)."""
    import torch

    if temperature == 0:
        return scores.argmax(-1)
    probabilities = (scores / temperature).softmax(-1).cpu()
    drawn = [
        torch.multinomial(row, 1, generator=stream)
        for row, stream in zip(probabilities, streams, strict=True)
    ]
    return torch.cat(drawn).to(scores.device)


def _stream(seed: int, number: int) -> Any:
    import torch

    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)


def _check(request: Generate, *, vocabulary: int) -> None:
    if request.max_tokens < 1 or request.temperature < 0:
        raise EngineError(
            f"max_tokens is {request.max_tokens} and temperature {request.temperature}.",
            "At least one token is generated, and a temperature is not negative.",
        )
    for number, prompt in enumerate(request.prompts):
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None or not prompt:
            what = "is empty" if not prompt else f"holds token id {wrong}"
            raise EngineError(
                f"Prompt {number} {what}.", f"Token ids are 0 to {vocabulary - 1}, one at least."
            )
