"""Our backend where vLLM hands it the whole session (0.25 and newer): start, chunks, finish."""

from __future__ import annotations

from typing import Any

from weightlane_vllm.transfer_receiver import TransferInit, TransferUpdate, refuse_older_sender
from weightlane_vllm.transfer_worker import making_worker, receiver_of


def engine_class() -> type[Any]:
    """The class, made once a call; imports vLLM's base class and no other engine code."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    base: Any = WeightTransferEngine

    class WeightlaneTransferEngine(base):  # type: ignore[misc]  # vLLM's class is not known to mypy
        """One worker's end; vLLM's own calls, each handed on."""

        init_info_cls = TransferInit
        update_info_cls = TransferUpdate
        supports_draft_weight_update = False

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            super().__init__(config, vllm_config, device, model)
            self._receiver = receiver_of(making_worker(config), model)

        def init_transfer_engine(self, init_info: TransferInit) -> None:
            self._receiver.announced(init_info)

        def start_weight_update(self) -> None:
            self._receiver.start()

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Not the base's: it waits for an accelerator, and a CPU build has none. `finish` waits.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: TransferUpdate) -> None:
            self._receiver.receive(update_info)

        def finish_weight_update(self) -> None:
            self._receiver.finish()

        def shutdown(self) -> None:
            self._receiver.close()

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            del iterator, trainer_args
            refuse_older_sender()

    return WeightlaneTransferEngine
