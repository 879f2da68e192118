"""Our backend where vLLM hands it chunks alone (0.22 to 0.24), each with a loader of vLLM's choosing.

There the worker itself starts and finishes an update, with a layerwise reload of its own in between, and
the backend hears of neither. So the worker's two calls are wrapped on the worker object (`ChunkSession`), and
the backend then does what newer ones do: it loads by the path that its own evidence chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weightlane_vllm.transfer_receiver import TransferInit, TransferUpdate, refuse_older_sender
from weightlane_vllm.transfer_worker import ChunkSession, making_worker, receiver_of


@dataclass(frozen=True)
class TransferChunk(TransferUpdate):
    """vLLM 0.23 and 0.24 ask each chunk whether it patches single elements; ours are whole tensors."""

    update_kind: str = "dense"


def engine_class() -> type[Any]:
    """The class, made once a call; imports vLLM's base class and no other engine code."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    base: Any = WeightTransferEngine

    class WeightlaneTransferEngine(base):  # type: ignore[misc]  # vLLM's class is not known to mypy
        """One worker's end; vLLM's own calls, each handed on."""

        init_info_cls = TransferInit
        update_info_cls = TransferChunk

        def __init__(self, config: Any, parallel_config: Any, model: Any) -> None:
            super().__init__(config, parallel_config, model)
            worker = making_worker(config)
            self._receiver = receiver_of(worker, model)
            self._session = ChunkSession(worker, self._receiver)
            self._session.apply()

        def init_transfer_engine(self, init_info: TransferInit) -> None:
            self._receiver.announced(init_info)

        def receive_weights(self, update_info: TransferUpdate, load_weights: Any) -> None:
            import torch

            del load_weights  # a layerwise reload of the worker's, or copies by the names of live parameters
            with torch.device("cpu"):  # the worker has set its own, and a loader that allocates follows it
                self._receiver.receive(update_info)

        def shutdown(self) -> None:
            self._session.undo()
            self._receiver.close()

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            del iterator, trainer_args
            refuse_older_sender()

    return WeightlaneTransferEngine
