"""What our backend needs of the worker that makes it: who that is, and its calls around an update.

vLLM's factory gives a backend the model and, before 0.25, no configuration
(https://github.com/vllm-project/vllm/blob/v0.23.0/vllm/distributed/weight_transfer/factory.py); whether the
worker sleeps no version tells. To be removed when vLLM hands a backend its worker.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from weightlane.errors import EngineError
from weightlane_vllm.sleep_watch import share_watch
from weightlane_vllm.transfer_layout import BACKEND
from weightlane_vllm.transfer_receiver import TransferReceiver

if TYPE_CHECKING:
    from types import FrameType


_SESSION = "_weightlane_chunk_session"


def making_worker(config: object) -> Any:
    """The worker whose call this is: the nearest caller that holds this very transfer configuration.

    Raises:
        EngineError: no caller does.
    """
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        held = getattr(frame.f_locals.get("self"), "__dict__", {})
        known = getattr(held.get("vllm_config"), "weight_transfer_config", None)
        if known is config and "model_runner" in held:
            return frame.f_locals["self"]
        frame = frame.f_back
    raise EngineError(
        f"Backend {BACKEND} was not made by a vLLM worker.",
        "The worker that makes it tells what it runs and whether it sleeps, and no caller is one.",
        'Start the engine with weight_transfer_config={"backend": "weightlane"}.',
    )


def receiver_of(worker: Any, model: Any) -> TransferReceiver:
    """The receiver that loads `model`, which `worker` runs."""
    from weightlane_vllm.worker import VllmWorkerEngine

    # The worker itself drops adapters when an update ends, where its version does.
    runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
    seen = SimpleNamespace(
        rank=int(worker.vllm_config.parallel_config.rank),
        device=worker.device,
        vllm_config=worker.vllm_config,
        model_runner=runner,
    )
    share_watch(worker, seen)
    return TransferReceiver(VllmWorkerEngine(seen), f"worker {seen.rank} of backend {BACKEND}")


class WholeUpdates(Protocol):
    """What is asked of `TransferReceiver`."""

    def start(self) -> None:
        """An update starts."""

    def finish(self) -> None:
        """It has to be whole."""


class ChunkSession:
    """The start and the finish of an update, on a worker that tells its backend of neither.

    Args:
        worker: vLLM's own worker object.
        receiver: is told.
    """

    def __init__(self, worker: Any, receiver: WholeUpdates) -> None:
        self._worker = worker
        self._receiver = receiver
        self._wrapped = False

    def apply(self) -> None:
        """Wraps the worker's two calls from now on. A second call changes nothing.

        A worker that loads another model makes another backend, whose session then takes the place of this.
        """
        if self._wrapped:
            return
        before: ChunkSession | None = vars(self._worker).get(_SESSION)
        if before is not None:
            before.undo()
        start, finish = self._worker.start_weight_update, self._worker.finish_weight_update

        def start_weight_update(is_checkpoint_format: bool = True) -> None:
            # As for weights in the form of live parameters: the worker then opens no reload of its own, that
            # would leave every layer without data until it is given all of it.
            del is_checkpoint_format
            start(is_checkpoint_format=False)
            try:
                self._receiver.start()
            except BaseException:
                finish()
                raise

        def finish_weight_update() -> None:
            finish()  # whatever comes, the next update may start
            self._receiver.finish()

        self._worker.start_weight_update = start_weight_update
        self._worker.finish_weight_update = finish_weight_update
        setattr(self._worker, _SESSION, self)
        self._wrapped = True

    def undo(self) -> None:
        """Puts back the worker's own. A second call changes nothing."""
        if self._wrapped:
            del self._worker.start_weight_update, self._worker.finish_weight_update  # the class's show again
            self._wrapped = False
