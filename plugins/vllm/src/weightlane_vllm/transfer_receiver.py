"""What one worker does with our weight-transfer backend's calls; vLLM's own class around it is elsewhere.

What a lane's plan checks is checked here at `announced`: refusals, a traced load, coverage. Each chunk is one
bucket in shared memory: its digest is compared before anything of it is loaded, and at the end of the first
update what was loaded is read back. An update that fails leaves weights of two versions; vLLM itself has no
fence there, so that its owner must not generate until an update has succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import xxhash

from weightlane.errors import EngineError, PlanError, ProtocolError, SyncError
from weightlane_vllm.transfer_layout import BACKEND, TransferLayout, layout_of_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.errors import Problem
    from weightlane.messages import WireTensor
    from weightlane.ring_file import PrivateFile
    from weightlane.trace.read_back import ReadBackCheck
    from weightlane.trace.table import PlacementTable


@dataclass(frozen=True)
class TransferInit:
    """The sender's tensors, its bucket size and the file that it shares."""

    tensors: list[Any] = field(default_factory=list)
    bucket_bytes: int = 0
    path: str = ""


@dataclass(frozen=True)
class TransferUpdate:
    """One bucket is in the file; `digest` is the xxh3 of its bytes, sixteen hex digits."""

    bucket: int = -1
    digest: str = ""


class LoadsWeights(Protocol):
    """What is asked of `VllmWorkerEngine`."""

    def load_problems(self) -> list[Problem]:
        """What stands against any load."""

    def trace(self, tensors: Sequence[WireTensor]) -> PlacementTable:
        """One load without data."""

    def tied(self) -> Mapping[str, str]:
        """Checkpoint tensors that the model reads through another one, and that one."""

    def live_tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors now."""

    def begin(self, version: int) -> None:
        """A load starts."""

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        """A part of it."""

    def finish(self, version: int) -> None:
        """It is whole."""


class TransferReceiver:
    """Called from the worker's own thread.

    Args:
        engine: loads into the worker's model.
        origin: how the worker names itself in errors.
    """

    def __init__(self, engine: LoadsWeights, origin: str) -> None:
        self._engine = engine
        self._origin = origin
        self._layout: TransferLayout | None = None
        self._file: PrivateFile | None = None
        self._table: PlacementTable | None = None
        self._wire: dict[str, str] = {}
        self._tied: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._next: int | None = None
        self._check: ReadBackCheck | None = None
        self._was_read_back = False

    def announced(self, init_info: TransferInit) -> None:
        """Traces a load of what is announced and opens the shared file.

        Raises:
            PlanError: every reason why it cannot be loaded whole, at once.
            ProtocolError: the announcement cannot be read, or the file is not the sender's own.
        """
        from weightlane.ring_file import map_private_file
        from weightlane.trace.coverage import coverage_problems

        self.close()
        layout = layout_of_json(init_info.tensors, init_info.bucket_bytes)
        problems = self._engine.load_problems()
        if problems:
            raise PlanError(problems)
        table = self._engine.trace(layout.tensors)
        alone = table.key.workers == 1
        problems = [
            problem
            for problem in coverage_problems([table], {}, receiver=self._origin)
            if alone or problem.kind != "unconsumed"  # others take the rest of a sharded tensor
        ]
        if problems:
            raise PlanError(problems)
        self._file = map_private_file(_of_a_sender(init_info.path), layout.nbytes)
        self._layout, self._table, self._was_read_back = layout, table, False
        names = {item.name for item in layout.tensors}
        self._tied = {name: owner for name, owner in self._engine.tied().items() if name in names}
        self._wire = {source.canonical: source.wire for source in table.sources}

    def start(self) -> None:
        """Opens a session; what an update before left behind is dropped.

        Raises:
            EngineError: nothing was announced yet.
        """
        from weightlane.trace.read_back import ReadBackCheck

        table = self._require_announced()[1]
        self._engine.begin(0)
        self._next, self._values = 0, {}
        self._check = None if self._was_read_back else ReadBackCheck(table, origin=self._origin)

    def receive(self, update_info: TransferUpdate) -> None:
        """Loads the bucket that is in the file now.

        Raises:
            SyncError: it is not the next one, or its bytes are not those that were sent.
        """
        layout, _, file = self._require_announced()
        number, self._next = self._next, None  # until it is loaded, no other may follow
        if number is None or update_info.bucket != number or number >= len(layout.buckets):
            raise SyncError(
                f"Bucket {update_info.bucket} came to {self._origin} out of turn.",
                f"{'An update is to be started first' if number is None else f'Bucket {number} was next'}.",
                "Start the update again.",
            )
        tensors = list(self._taken(layout, file, update_info))
        if self._check is not None:
            self._check.arrived(tensors)
        self._engine.load_weights(tensors)
        self._next = number + 1

    def finish(self) -> None:
        """Ends the session and, the first time, reads back what was loaded.

        Raises:
            SyncError: buckets are missing, or a tensor that the model reads through another came with values
                of its own, which are lost.
            VerificationError: elements are not where they were written.
        """
        layout = self._require_announced()[0]
        arrived, self._next = self._next, None
        if arrived != len(layout.buckets):
            raise SyncError(
                f"The update of {self._origin} is not whole.",
                f"{arrived or 0} of {len(layout.buckets)} buckets were loaded.",
                "Start the update again; until one succeeds the weights are of two versions.",
            )
        self._require_tied()
        self._engine.finish(0)
        if self._check is not None:
            self._check.require_equal(self._engine.live_tensors())
            self._check, self._was_read_back = None, True

    def close(self) -> None:
        """Lets go of the sender's file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = self._layout = self._table = self._next = None

    def _note_tied(self, layout: TransferLayout, bucket: BucketLayout, memory: memoryview) -> None:
        compared = {*self._tied, *self._tied.values()}
        for entry in bucket.entries:
            told = layout.tensors[entry.tensor]
            if told.name in compared:
                data = memory[entry.offset : entry.offset + entry.nbytes]
                self._values[told.name] = f"{told.dtype} {xxhash.xxh3_64_hexdigest(data)}"

    def _require_tied(self) -> None:
        for name, owner in self._tied.items():
            if self._values.get(name) != self._values.get(owner):
                raise SyncError(
                    f"{name} and {owner} came to {self._origin} with different values.",
                    f"The engine was started from a checkpoint that ties them, and reads {owner} for both.",
                    "Tie them in the trainer, or start the engine from an untied checkpoint; until an update "
                    "succeeds its weights are no version.",
                )

    def _require_announced(self) -> tuple[TransferLayout, PlacementTable, PrivateFile]:
        if self._layout is None or self._table is None or self._file is None:
            raise EngineError(
                f"Nothing was announced to {self._origin}.",
                "init_weight_transfer_engine tells it what will be sent, once.",
                "Call it first; weightlane_vllm.transfer_sender.WeightSender does.",
            )
        return self._layout, self._table, self._file

    def _taken(
        self, layout: TransferLayout, file: PrivateFile, update: TransferUpdate
    ) -> Iterator[tuple[str, Any]]:
        """(wire name, view) of what this receiver takes; a tensor that it reads through another is left."""
        import torch

        from weightlane.packing import unpack_bucket

        bucket = layout.buckets[update.bucket]
        file.require_whole()
        memory = memoryview(file.memory)[: bucket.nbytes]
        seen = xxhash.xxh3_64_hexdigest(memory)
        if seen != update.digest:
            raise SyncError(
                f"Bucket {update.bucket} that {self._origin} reads is not what was sent.",
                f"Its digest is {seen}, and the sender told {update.digest}.",
                "Start the update again; nothing of it was loaded. If another sender was made since, "
                "make this one anew: only the last is read.",
            )
        flat = torch.frombuffer(memory, dtype=torch.uint8) if bucket.nbytes else torch.empty(0).byte()
        self._note_tied(layout, bucket, memory)
        for name, view in unpack_bucket(flat, bucket, layout.tensors):
            if name in self._wire:
                yield self._wire[name], view


def refuse_older_sender() -> NoReturn:
    """What vLLM's own senders get of a backend that they cannot feed.

    Raises:
        EngineError: always.
    """
    raise EngineError(
        f"Backend {BACKEND} is not sent to by trainer_send_weights.",
        "Its sender keeps memory from one update to the next.",
        "Use weightlane_vllm.transfer_sender.WeightSender.",
    )


def _of_a_sender(given: str) -> Path:
    """The path, if a sender on this host can have made it: no other file is opened on somebody's word."""
    from weightlane.ring_file import shared_memory_folder

    path = Path(given)
    if path.parent != shared_memory_folder() or not path.name.startswith("weightlane-transfer-"):
        raise ProtocolError(
            f"{given!r} is no memory of a sender of backend {BACKEND}.",
            f"That is a file weightlane-transfer-... in {shared_memory_folder()}.",
            "Send with weightlane_vllm.transfer_sender.WeightSender, on the engine's host.",
        )
    return path
