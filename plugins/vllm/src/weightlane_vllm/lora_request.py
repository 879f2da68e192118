"""What a request to vLLM names to be answered with an adapter of ours.

vLLM tells adapters apart by number inside a worker, and its prefix cache by name and path (by name alone in
0.27.1). All three follow from what the lane tells, alike in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import xxhash

if TYPE_CHECKING:
    from weightlane.adapters import AdapterRef

_FIRST = 1 << 30
_NOWHERE = "/weightlane/adapters-in-memory"


def lora_number(name: str) -> int:
    """vLLM's `lora_int_id` of a served name: 2**30 to 2**31 - 1, out of the way of numbers by hand."""
    return _FIRST + xxhash.xxh3_64_intdigest(name.encode()) % _FIRST


def lora_path(ref: AdapterRef) -> str:
    """The path that a request carries, with the version in it; nothing is there.

    It is absolute: vLLM takes a relative path that does not exist for a name on a model hub, and asks there.
    """
    return f"{_NOWHERE}/{quote(ref.name, safe='@')}/{ref.version}"


def lora_request(ref: AdapterRef) -> Any:
    """vLLM's `LoRARequest` for what `Lane.adapter_ref` gives: `llm.generate(prompts, lora_request=...)`."""
    return numbered_request(ref, lora_number(ref.name))


def is_ours(request: Any) -> bool:
    """Whether a `LoRARequest` (or None) names an adapter of a lane."""
    return request is not None and str(request.lora_path).startswith(f"{_NOWHERE}/")


def numbered_request(ref: AdapterRef, number: int) -> Any:
    """The same under another number, for an adapter that no request names yet."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(ref.name, number, lora_path(ref))
