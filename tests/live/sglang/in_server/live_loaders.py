"""Loaders for these tests alone, entered as `--custom-weight-loader` beside weightlane's own.

Each answers by a file, as ours does, with JSON: what the test asked, or the traceback.
"""

from __future__ import annotations

import json
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def checksums(model: Any, named_tensors: Any) -> None:
    """Per parameter and buffer: which object it is, where it lies, and a hash of all its bytes."""
    answer(named_tensors, lambda _: _checksums(model))


def oracle(model: Any, named_tensors: Any) -> None:
    """Traces a load, then loads real tensors that carry element numbers, and tells where the two differ."""
    answer(named_tensors, lambda message: _differences(model, message))


def change_one(model: Any, named_tensors: Any) -> None:
    """`RANK NAME`: on that rank, the first element of the tensor becomes another. Answers with the rank."""
    answer(named_tensors, lambda message: _change_one(model, *message.decode().split()))


def _change_one(model: Any, rank: str, name: str) -> int:
    import torch

    from weightlane_sglang.tracing import tensor_parallel_rank

    own = tensor_parallel_rank()
    if own == int(rank):
        with torch.inference_mode():
            model.get_parameter(name).view(-1)[0] += 1.0
    return own


def _checksums(model: Any) -> dict[str, list[Any]]:
    import torch
    import xxhash

    return {
        name: [
            id(tensor),
            tensor.data_ptr(),
            xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()),
        ]
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }


def _differences(model: Any, message: bytes) -> list[str]:
    from weightlane.messages import decode
    from weightlane.testing.element_oracle import compare_with_oracle
    from weightlane_sglang.loader_messages import TraceLoad
    from weightlane_sglang.tracing import receiver_of, trace_model

    request: TraceLoad = decode(message, TraceLoad, sender="a test")
    table = trace_model(model, request.tensors)
    return [str(item) for item in compare_with_oracle(receiver_of(model), table)]


def answer(named_tensors: Any, work: Callable[[bytes], Any]) -> None:
    """Does the work on the request's message, and writes what it gives as JSON, in this rank's file."""
    from weightlane_sglang.run_folder import write_answer
    from weightlane_sglang.tracing import tensor_parallel_rank

    ((token, tensor),) = named_tensors
    try:
        found = work(tensor.cpu().numpy().tobytes())  # on a GPU it has been moved there
    except Exception:  # noqa: BLE001 - one that got out would end the server
        found = {"error": traceback.format_exc()}
    write_answer(token, tensor_parallel_rank(), json.dumps(found).encode())
