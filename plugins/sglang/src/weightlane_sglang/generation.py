"""Generation over `/generate` with token ids in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import EngineError
from weightlane.generation_lengths import require_lengths
from weightlane.messages import Generation
from weightlane_sglang.http_channel import quoted
from weightlane_sglang.server_facts import version_number

if TYPE_CHECKING:
    from collections.abc import Sequence


class _FinishReason(msgspec.Struct):
    type: str = ""
    message: str | None = None


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float | None, int, Any]]
    finish_reason: _FinishReason | None = None
    weight_version: str | None = None


class _Output(msgspec.Struct):
    meta_info: _Meta


def generate_body(
    prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int, adapter: str = ""
) -> bytes:
    """The request: one continuation per prompt, with the chosen tokens' log-probs.

    Sampling is unrestricted (no top-k, top-p or min-p) whatever the server prefers. SGLang honours a seed
    only when it runs with deterministic inference; it is sent for sampling alone. `adapter` is the name of a
    loaded one; "" asks the base.

    Raises:
        EngineError: a temperature other than 0 and 1.
    """
    if temperature not in (0.0, 1.0):
        raise EngineError(
            f"SGLang was asked to generate at temperature {temperature:g}.",
            "Its log-probs there are of the logits divided by the temperature, not the model's own, unless "
            "the server runs with SGLANG_RETURN_ORIGINAL_LOGPROB set, which it does not tell.",
            "Use temperature 0 (greedy) or 1.",
        )
    sampling: dict[str, object] = {
        "max_new_tokens": max_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "ignore_eos": True,  # the contract asks for exactly max_tokens
    }
    if temperature > 0:
        sampling["sampling_seed"] = seed
    request: dict[str, object] = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if adapter:
        request["lora_path"] = adapter  # SGLang's word for the name of one that is loaded
    return msgspec.json.encode(request)


def read_generations(answer: bytes, *, prompts: int, max_tokens: int) -> tuple[Generation, ...]:
    """The continuations in prompt order; log-probs are natural logarithms.

    Raises:
        EngineError: a continuation is missing, was aborted, has not `max_tokens` tokens, or has another
            shape than SGLang's.
    """
    try:
        outputs = msgspec.json.decode(answer, type=list[_Output])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(
            f"The answer to /generate has another shape than SGLang's: {error}.",
            f"It begins with {quoted(answer[:300])}.",
        ) from error
    if len(outputs) != prompts:
        raise EngineError(f"SGLang gave {len(outputs)} continuations for {prompts} prompts.")
    generations = tuple(_generation(output.meta_info, number) for number, output in enumerate(outputs))
    require_lengths(generations, max_tokens, engine="SGLang")
    return generations


def _generation(meta: _Meta, number: int) -> Generation:
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        reason = meta.finish_reason.message or "no reason given"
        raise EngineError(
            f"SGLang aborted the continuation of prompt {number}: {reason}.",
            "A pause for a weight sync aborts requests in flight.",
            "Generate again.",
        )
    logprobs: list[float] = []
    for logprob, token, _ in meta.output_token_logprobs:
        if logprob is None:
            raise EngineError(f"SGLang gave no log-prob for token {token} of prompt {number}.")
        logprobs.append(logprob)
    return Generation(
        token_ids=tuple(token for _, token, _ in meta.output_token_logprobs),
        logprobs=tuple(logprobs),
        weight_version=version_number(meta.weight_version),
    )
