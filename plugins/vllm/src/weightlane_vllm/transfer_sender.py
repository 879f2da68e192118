"""The sending end of our weight-transfer backend, for trainers that drive vLLM by its own calls.

A lane (`weightlane.connect`) does more: it gathers from sharded trainers, keeps replicas in step and fences
them. This is for a loop that already calls vLLM's weight transfer. No engine is imported here.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from weightlane.buckets import DEFAULT_BUCKET_BYTES
from weightlane.errors import UsageError
from weightlane.messages import WireTensor
from weightlane_vllm.transfer_layout import TransferLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from weightlane.ring_file import PrivateFile


class SyncClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`: its clients for HTTP and Ray fit, and `OfflineClient` here."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Announces."""

    def start_weight_update(self) -> None:
        """Opens a session in every worker."""

    def update_weights(self, update_info: Any) -> None:
        """One chunk; returns when every worker has loaded it."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the session."""


class OfflineClient:
    """A `SyncClient` over a `vllm.LLM` of this process, whose own calls wrap each dictionary in another.

    Attributes:
        takes_weight_version: whether this vLLM can be told a version when an update ends (0.27 and newer).
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.takes_weight_version = "weight_version" in inspect.signature(llm.finish_weight_update).parameters

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Announces."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Opens a session in every worker."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """One chunk; returns when every worker has loaded it."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the session."""
        if self.takes_weight_version:
            self._llm.finish_weight_update(weight_version)
        else:
            self._llm.finish_weight_update()


class WeightSender:
    """Announces a model's tensors once, then sends them as often as wanted.

    Args:
        client: of an engine on this host, started with `weight_transfer_config={"backend": "weightlane"}`.
        tensors: gives (canonical name, whole tensor) pairs, in one order at each call; buffers that training
            changes among them. `lambda: model.named_parameters()` for a model without any.
        bucket_bytes: how much travels at a time.

    Raises:
        PlanError: the engine cannot load them whole (as vLLM's own error from another process).
        SyncError: shared memory cannot be had.
    """

    def __init__(
        self,
        client: SyncClient,
        tensors: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        from weightlane.packing import dtype_name
        from weightlane.ring_file import create_private_file

        self._client = client
        self._tensors = tensors
        told = [WireTensor(name, tuple(item.shape), dtype_name(item.dtype)) for name, item in tensors()]
        self._layout = TransferLayout.of(told, bucket_bytes)
        self._file: PrivateFile | None = create_private_file("transfer", self._layout.nbytes)
        try:
            client.init_weight_transfer_engine({**self._layout.as_json(), "path": str(self._file.path)})
        except BaseException:
            self.close()
            raise
        self._file.path.unlink(missing_ok=True)  # every worker has it open

    def send(self, weight_version: str | None = None) -> None:
        """One update: every tensor as it is now. The engine's prefix cache is its owner's to reset.

        Raises:
            ExportError: the tensors are not those that were announced.
            UsageError: the sender is closed, or this vLLM cannot be told a version.
        """
        import torch

        from weightlane.packing import pack_bucket

        if self._file is None:
            raise UsageError("This sender is closed.", "Its memory was let go.", "Make another one.")
        if weight_version is not None and not getattr(self._client, "takes_weight_version", True):
            raise UsageError(
                f"This vLLM cannot be told that its weights are version {weight_version!r}.",
                "Its finish_weight_update takes none before 0.27.",
                "Call send() without weight_version.",
            )
        given = [(number, tensor.detach()) for number, (_, tensor) in enumerate(self._tensors())]
        self._client.start_weight_update()
        try:
            for layout in self._layout.buckets:
                memory = memoryview(self._file.memory)[: layout.nbytes]
                bucket = (
                    torch.frombuffer(memory, dtype=torch.uint8) if layout.nbytes else torch.empty(0).byte()
                )
                numbers = [entry.tensor for entry in layout.entries]
                chosen = [given[number] for number in numbers if number < len(given)]
                pack_bucket(bucket, layout, self._layout.tensors, chosen)
                digest = xxhash.xxh3_64_hexdigest(memory)
                self._client.update_weights({"bucket": layout.index, "digest": digest})
            self._client.finish_weight_update(weight_version)
        except BaseException:
            # Only when a session has ended lets vLLM another start. An update that fails ends it (0.23 and
            # newer), before that only its finish does.
            with contextlib.suppress(Exception):
                self._client.update_weights({"bucket": -1, "digest": ""})
            with contextlib.suppress(Exception):
                self._client.finish_weight_update()
            raise

    def close(self) -> None:
        """Lets go of the shared memory. Idempotent."""
        if self._file is not None:
            self._file.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
