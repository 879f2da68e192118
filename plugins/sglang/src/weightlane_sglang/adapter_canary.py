"""Without our code in a server: do outputs with an adapter differ from the base's at all?

An adapter that bound to nothing answers bit by bit as the base does, where the base answers twice the same:
beside other requests it may not, since a GPU adds up otherwise in another batch. That some of it is bound is
all that this tells; which modules, and with which scale, it cannot tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.errors import VerificationError
from weightlane.peft import parse_lora_name
from weightlane_sglang.contract import GENERATE_ROUTE
from weightlane_sglang.server_facts import decoded

if TYPE_CHECKING:
    from weightlane.adapter_engine import AdapterLoad
    from weightlane_sglang.channel import Channel

_PROMPT = tuple(range(1, 17))  # ids that every vocabulary has
_ATTEMPTS = 3  # a quiet moment may come
_ABOVE_NOISE = 10.0


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]]


class _Output(msgspec.Struct):
    meta_info: _Meta


def require_other_outputs(channel: Channel, load: AdapterLoad, *, seconds: float) -> str:
    """Asks for the log-probs of one prompt, by base, adapter and base again; gives what was seen, in words.

    Raises:
        VerificationError: they are the same although the adapter changes something.
        EngineError: the server does not generate with it, or answers in another shape than SGLang's.
    """
    if not _changes_something(load):
        return "its matrices change nothing yet, so that outputs tell nothing"
    noise = moved = 0.0
    for _ in range(_ATTEMPTS):
        before, adapted, after = (_logprobs(channel, name, seconds) for name in ("", load.ref.name, ""))
        if adapted in (before, after):
            raise VerificationError(
                f"SGLang at {channel.url} answers with adapter {load.ref.name} exactly as with the base.",
                "It took the adapter and bound it to nothing: names, modules or rank are not what it serves.",
                "Let weightlane's loader into the server (weightlane launch-args sglang): it tells what is "
                "held.",
            )
        noise, moved = _apart(before, after), _apart(before, adapted)
        if moved > _ABOVE_NOISE * noise:
            beside = f", and the base's from each other by up to {noise:.2g}" if noise else ""
            return f"outputs with it differ from the base's, log-probs by up to {moved:.2g}{beside}"
    return (
        f"outputs tell nothing: log-probs with it differ from the base's by up to {moved:.2g}, and the "
        f"base's from each other by up to {noise:.2g}"
    )


def _changes_something(load: AdapterLoad) -> bool:
    sides: dict[str, set[str]] = {}
    for name, tensor in load.tensors.items():
        parsed = parse_lora_name(name)
        if parsed is not None and bool(tensor.count_nonzero()):
            sides.setdefault(parsed.module, set()).add(parsed.side)
    return any(len(found) == 2 for found in sides.values())


def _apart(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))


def _logprobs(channel: Channel, adapter: str, seconds: float) -> list[float]:
    request: dict[str, object] = {
        "input_ids": list(_PROMPT),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if adapter:
        request["lora_path"] = adapter
    body = msgspec.json.encode(request)
    answer = channel.send("POST", GENERATE_ROUTE, timeout_seconds=seconds, body=(body,), length=len(body))
    told = decoded(answer, _Output, GENERATE_ROUTE).meta_info.input_token_logprobs
    return [value for value, _, _ in told if value is not None]
