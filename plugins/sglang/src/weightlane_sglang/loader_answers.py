"""Inside the server: reads one request of a controller, does what it asks, writes this rank's answer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from weightlane.errors import ProtocolError
from weightlane.failures import failure_of
from weightlane.messages import decode, encode
from weightlane_sglang import __version__
from weightlane_sglang.loader_messages import (
    MOST_REQUEST_BYTES,
    ElementsHashed,
    HashElements,
    LoaderReply,
    LoaderRequest,
    ReadAdapter,
    Released,
    TellReleased,
    Traced,
)
from weightlane_sglang.released_tags import released_tags
from weightlane_sglang.run_folder import write_answer
from weightlane_sglang.tables_held import TablesHeld
from weightlane_sglang.tracing import live_tensors_of, tensor_parallel_rank, trace_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

_held = TablesHeld()


def answer_request(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Writes the answer, or the failure, for the exchange that the request's only tensor is named after.

    Raises:
        ProtocolError: the request is not one named tensor, or its name is that of no exchange.
        OSError: nobody waits in the run folder.
    """
    if len(named_tensors) != 1:
        raise ProtocolError(f"A request for weightlane's loader holds {len(named_tensors)} tensors, not one.")
    ((token, tensor),) = named_tensors
    rank = tensor_parallel_rank()
    try:
        reply: LoaderReply = _reply(model, tensor)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        origin = f"the scheduler of TP rank {rank}, process {os.getpid()}, weightlane-sglang {__version__}"
        reply = failure_of(error, origin=origin)
    write_answer(token, rank, encode(reply))


def _reply(model: nn.Module, tensor: Any) -> LoaderReply:
    request: LoaderRequest = decode(_bytes_of(tensor), LoaderRequest, sender="a controller")
    if isinstance(request, HashElements):
        from weightlane.trace.live_hashes import live_hashes

        table = _held.of_rank(request.tables, tensor_parallel_rank(), model)
        return ElementsHashed(live_hashes(table, live_tensors_of(model)))
    if isinstance(request, TellReleased):
        return Released(released_tags())
    if isinstance(request, ReadAdapter):
        from weightlane_sglang.adapter_held import held_adapter

        return held_adapter(model, request)
    return Traced(_held.keep(trace_model(model, request.tensors), model), released_tags() or ())


def _bytes_of(tensor: Any) -> bytes:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ProtocolError("A request for weightlane's loader is not a row of bytes.")
    if tensor.numel() > MOST_REQUEST_BYTES:
        raise ProtocolError(
            f"A request for weightlane's loader has {tensor.numel()} bytes.",
            f"No more than {MOST_REQUEST_BYTES} are read.",
        )
    return tensor.detach().cpu().numpy().tobytes()
