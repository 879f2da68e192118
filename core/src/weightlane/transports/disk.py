"""Transport `disk`: rank 0 writes a version as safetensors files, then every worker loads them.

One sink feeds all replicas of the lane that take this transport: the bytes are written once. Workers start
when the manifest is there, so generation is held back while they load, not while rank 0 writes.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import xxhash

from weightlane.bounded_calls import BoundedCalls
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.errors import SyncError, SyncTimeoutError
from weightlane.packing import WireDigest, memory_of, pack_bucket
from weightlane.transports.disk_layout import INDEX_NAME, MANIFEST_NAME, index_of, store_bucket
from weightlane.transports.disk_manifest import FORMAT, FolderManifest, StoredFile, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.plan import LanePlan
    from weightlane.transports.disk_folder import LaneFolder, SyncFolder
    from weightlane.transports.sink import SinkBounds

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version that lies whole in `folder` below the lane's; `manifest_digest` is its manifest's xxh3."""

    sync: int
    version: int
    folder: str
    manifest_digest: str


class DiskSink:
    """Writes each bucket into a file of its own.

    Every operation on the folder runs in a thread of its own and is waited for as long as a bucket: a file
    system that is gone holds its caller for ever. Behind one that never came back nothing is removed until
    the next sync, which tries again.

    Args:
        plan: the lane's plan.
        folder: the lane's folder; this sink closes it.
        receivers: called with the written version, one per replica; each starts that replica's loading and
            returns.
    """

    def __init__(
        self, plan: LanePlan, folder: LaneFolder, receivers: Iterable[Callable[[WrittenVersion], None]]
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._receivers = receivers  # asked for anew at each sync: who takes part may change
        self._names = plan.sent_names
        self._sync = 0
        self._writing: _Writing | None = None
        self._closed = False
        self._seconds = DEFAULT_BOUNDS.bucket  # until a sync brings the lane's own
        self._calls: BoundedCalls | None = None

    @property
    def path(self) -> str:
        """The lane's folder."""
        return self._folder.path

    def begin(self, sync: int, version: int, bounds: SinkBounds) -> None:
        """Makes the sync's folder, and removes what is left of those before that were not published."""
        self._end()
        self._sync = sync
        self._forget_calls()  # the last one may hang for ever; this sync is asked anew
        self._seconds = bounds.bucket_seconds
        folder = self._bounded(lambda: self._folder.start(sync, version), "its folder", ())
        digest = WireDigest(self._plan.tensors) if self._plan.verify == "digest" else None
        largest = max(layout.nbytes for layout in self._plan.buckets)
        self._writing = _Writing(
            sync,
            version,
            folder,
            bounds,
            # New each time: a write that never came back may still hold the last one.
            torch.zeros(largest, dtype=torch.uint8),
            digest,
            [],
        )

    def put(self, layout: BucketLayout, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Packs one bucket and writes its file; returns when the bytes are on the disk."""
        writing = self._begun()
        writing.bounds.check()
        bucket = writing.buffer[: layout.nbytes]
        pack_bucket(bucket, layout, self._plan.tensors, tensors)
        memory = memory_of(bucket)
        if writing.digest:
            writing.digest.update(memory, layout)
        wires = [self._plan.tensors[entry.tensor] for entry in layout.entries]
        names = [self._names[entry.tensor] for entry in layout.entries]
        pieces = [memory[entry.offset : entry.offset + entry.nbytes] for entry in layout.entries]
        stored = store_bucket(layout.index, len(self._plan.buckets), wires, names)
        listed = tuple(
            StoredTensor(name, wire.name, wire.shape, wire.dtype, xxhash.xxh3_64_hexdigest(piece))
            for name, wire, piece in zip(names, wires, pieces, strict=True)
        )
        self._write(stored.name, [stored.header, *(pieces[item] for item in stored.order)], names)
        writing.files.append(StoredFile(stored.name, stored.nbytes, listed))

    def finish(self) -> str:
        """Writes index and manifest, then has every replica start loading; their reports tell the rest."""
        writing = self._begun()
        digest = writing.digest.hexdigest() if writing.digest else ""
        named = [(file.name, [tensor.name for tensor in file.tensors]) for file in writing.files]
        self._write(INDEX_NAME, [index_of(named, self._plan.nbytes)], ())
        manifest = FolderManifest(
            format=FORMAT,
            lane=self._plan.lane,
            plan_digest=self._plan.digest(),
            sync=writing.sync,
            version=writing.version,
            manifest=self._plan.manifest,
            files=tuple(writing.files),
            digest=digest,
        )
        data = manifest.encoded()
        self._write(MANIFEST_NAME, [data], ())
        self._bounded(writing.folder.settle, "its folder", ())
        written = WrittenVersion(
            writing.sync, writing.version, writing.folder.name, xxhash.xxh3_64_hexdigest(data)
        )
        self._end()
        for receive in self._receivers:
            receive(written)
        return digest

    def abort(self, cause: str, *, sync: int | None = None) -> None:  # noqa: ARG002 - a Sink's
        """Removes what was written: a worker that still reads sees that the manifest is gone."""
        self._end()
        failed = self._sync if sync is None else sync
        self._if_it_answers(lambda: self._folder.discard(failed))

    def published(self, sync: int) -> None:
        """Every replica serves this sync's version, so older ones are not needed. Never raises."""
        self._folder.published(sync)  # noted here and now, whether or not the file system answers
        self._if_it_answers(self._folder.remove_unpublished)

    def close(self) -> None:
        """Removes what is not to be kept. Idempotent."""
        self._end()
        self._if_it_answers(self._folder.close)
        self._forget_calls()
        self._closed = True

    def _write(self, name: str, pieces: Sequence[bytes | memoryview], tensors: Sequence[str]) -> None:
        folder = self._begun().folder
        self._bounded(lambda: folder.write(name, pieces), name, tensors)

    def _call(self, operation: Callable[[], _T]) -> _T:
        if self._calls is None:
            self._calls = BoundedCalls("weightlane-disk", self._seconds)
        return self._calls.run(operation)

    def _forget_calls(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _if_it_answers(self, operation: Callable[[], None]) -> None:
        """For removal, which is worth neither an error nor, behind a call that hangs, another wait."""
        if not self._closed:
            with contextlib.suppress(OSError):  # a TimeoutError is one
                self._call(operation)

    def _bounded(self, operation: Callable[[], _T], name: str, tensors: Sequence[str]) -> _T:
        try:
            return self._call(operation)
        except TimeoutError as error:
            raise SyncTimeoutError(
                f"{name} in {self._folder.path} was not written within {self._seconds:g} s"
                f"{_holding(tensors)}.",
                "The file system does not answer, or is too slow.",
                "Check it, use smaller buckets, or raise Bounds.bucket.",
            ) from error
        except OSError as error:
            raise self._failed(name, tensors, error) from error

    def _failed(self, name: str, tensors: Sequence[str], error: OSError) -> SyncError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            megabytes = self._plan.nbytes / 1e6
            why = f"A version has {megabytes:.1f} MB, and two lie there while one replaces the other."
            fix = "Free space or raise the limit there, or pass another folder to connect(folder=...)."
        else:
            why = f"Transport disk writes there as user {os.getuid()}."
            fix = "Give this user the right to write there, or pass another folder to connect(folder=...)."
        reason = f"{error.strerror or error}{_holding(tensors)}"
        return SyncError(f"{name} could not be written to {self._folder.path}: {reason}.", why, fix)

    def _begun(self) -> _Writing:
        if self._writing is None:
            raise RuntimeError("begin() comes before put() and finish()")
        return self._writing

    def _end(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            # Where writes are made: a descriptor closed under one that still runs could become another's.
            self._if_it_answers(writing.folder.close)


@dataclass(slots=True)
class _Writing:
    """A sync between its begin and its manifest."""

    sync: int
    version: int
    folder: SyncFolder
    bounds: SinkBounds
    buffer: Tensor
    digest: WireDigest | None
    files: list[StoredFile]


def _holding(tensors: Sequence[str]) -> str:
    if not tensors:
        return ""
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f" (it holds {tensors[0]}{more})"
