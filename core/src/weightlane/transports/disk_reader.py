"""The worker's end of transport `disk`: a version's folder, checked before and while it is read.

Files are read, not mapped: a mapped file that somebody cuts short ends the engine by SIGBUS, and bytes whose
digest was checked in a map can change before they are copied. One bucket is in memory at a time, laid out as
over every other transport.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import PurePath
from typing import TYPE_CHECKING

import torch
import xxhash

from weightlane.errors import ProtocolError, SyncError, VerificationError
from weightlane.packing import memory_of
from weightlane.transports.disk_folder import SYNC_FOLDER
from weightlane.transports.disk_layout import MANIFEST_NAME, StoredBucket
from weightlane.transports.disk_manifest import files_as_planned, read_manifest, require_this_sync
from weightlane.transports.disk_private import open_private_file, open_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.messages import ReceiveDisk, ReceivePlan
    from weightlane.transports.disk_manifest import StoredFile

_MOST_MANIFEST_BYTES = 256 << 20


def require_lane_folder(path: str) -> None:
    """Raises ProtocolError where this worker does not see the lane's folder as the trainer made it."""
    with _lane_folder(path):
        pass


class VersionReader:
    """One version's folder; a context manager.

    Entering checks all that can be checked without reading the weights: the manifest against the plan, every
    file's owner, mode and size. `read` checks each file's header and each tensor's digest.

    Args:
        plan: the attached plan; its `folder` is the lane's.
        request: which sync's folder to read.
    """

    def __init__(self, plan: ReceivePlan, request: ReceiveDisk) -> None:
        self._plan = plan
        self._request = request
        self._where = f"{plan.folder}/{request.folder}"
        self._descriptor = -1
        self._listed: tuple[StoredFile, ...] = ()
        self._files: tuple[StoredBucket, ...] = ()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> VersionReader:  # noqa: PYI034 - not made for inheritance
        name = self._request.folder
        if not SYNC_FOLDER.fullmatch(name):
            raise ProtocolError(
                f"{name!r} is not the name of a sync's folder.",
                "A worker opens nothing else below the folder of its lane.",
            )
        with _lane_folder(self._plan.folder) as lane:
            try:
                self._descriptor = open_private_folder(name, below=lane)
            except OSError as error:
                raise self._unreadable(self._where, error) from error
        try:
            self._check_manifest()
            for number in range(len(self._files)):
                os.close(self._open(number))
        except BaseException:
            self.__exit__()
            raise
        largest = max((layout.nbytes for layout in self._plan.buckets), default=0)
        self._buffer = torch.zeros(largest, dtype=torch.uint8)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, layout: BucketLayout) -> tuple[Tensor, memoryview, float]:
        """The bucket as tensor and as memory, valid until the next one, and the seconds that reading took.

        Raises:
            SyncError: the trainer has withdrawn the version.
            VerificationError: a header or a tensor is not what the manifest says; names file and tensor.
        """
        started = time.monotonic()
        self._require_offered()
        bucket = self._buffer[: layout.nbytes]
        memory = memory_of(bucket)
        stored = self._files[layout.index]
        descriptor = self._open(layout.index)
        try:
            self._check_header(descriptor, layout.index)
            for position in stored.order:
                entry = layout.entries[position]
                piece = memory[entry.offset : entry.offset + entry.nbytes]
                self._fill(descriptor, piece, stored.starts[position], layout.index, position)
        finally:
            os.close(descriptor)
        for entry, tensor in zip(layout.entries, self._listed[layout.index].tensors, strict=True):
            found = xxhash.xxh3_64_hexdigest(memory[entry.offset : entry.offset + entry.nbytes])
            if found != tensor.digest:
                raise VerificationError(
                    f"{tensor.name} in {self._where}/{stored.name} has digest {found}, but the trainer wrote "
                    f"{tensor.digest}.",
                    "The file was altered, or the file system lost data.",
                    "Let nothing else write there, and sync again.",
                )
        return bucket, memory, time.monotonic() - started

    def _check_manifest(self) -> None:
        where = f"{self._where}/{MANIFEST_NAME}"
        try:
            descriptor = open_private_file(MANIFEST_NAME, below=self._descriptor)
        except OSError as error:
            raise self._unreadable(where, error) from error
        try:
            size = os.fstat(descriptor).st_size
            if size > _MOST_MANIFEST_BYTES:
                raise ProtocolError(f"{where} has {size} bytes, more than a manifest can have.")
            data = os.pread(descriptor, size, 0)
        finally:
            os.close(descriptor)
        manifest = read_manifest(data, where)
        require_this_sync(manifest, self._request, where)
        self._files = files_as_planned(manifest, self._plan, where)
        self._listed = manifest.files
        found = xxhash.xxh3_64_hexdigest(data)
        if found != self._request.manifest_digest:
            raise VerificationError(
                f"{where} has digest {found}, but the trainer wrote {self._request.manifest_digest}.",
                "It was altered since.",
                "Let nothing else write there, and sync again.",
            )

    def _open(self, number: int) -> int:
        """A file's descriptor, once its size is known to be right."""
        stored = self._files[number]
        path = f"{self._where}/{stored.name}"
        try:
            descriptor = open_private_file(stored.name, below=self._descriptor)
        except OSError as error:
            self._require_offered()
            raise self._unreadable(path, error, self._tensors_of(number)) from error
        size = os.fstat(descriptor).st_size
        if size != stored.nbytes:
            os.close(descriptor)
            raise VerificationError(
                f"{path} has {size} bytes, but the trainer wrote {stored.nbytes}"
                f"{self._cut_short(number, size)}.",
                "The file was cut short or overwritten, or the file systems of trainer and engine differ.",
                "Let nothing else write there, and sync again.",
            )
        return descriptor

    def _check_header(self, descriptor: int, number: int) -> None:
        stored = self._files[number]
        found = os.pread(descriptor, len(stored.header), 0)
        if found != stored.header:
            raise VerificationError(
                f"The header of {self._where}/{stored.name} differs from the plan's"
                f"{self._tensors_of(number)}.",
                "The file was altered since the trainer wrote it.",
                "Let nothing else write there, and sync again.",
            )

    def _fill(self, descriptor: int, piece: memoryview, start: int, number: int, position: int) -> None:
        done = 0
        while done < len(piece):
            path = f"{self._where}/{self._files[number].name}"
            try:
                count = os.preadv(descriptor, [piece[done:]], start + done)
            except OSError as error:
                raise self._unreadable(path, error, self._tensors_of(number)) from error
            if count == 0:
                name = self._listed[number].tensors[position].name
                raise VerificationError(
                    f"{path} ends inside {name}.", "The file was cut short while it was read."
                )
            done += count

    def _require_offered(self) -> None:
        """The trainer removes the manifest of a sync that failed, here or elsewhere."""
        try:
            os.stat(MANIFEST_NAME, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError as error:
            raise SyncError(
                f"{self._where} is no version any more: its manifest is gone.",
                "The trainer gave this sync up, or somebody removed its files.",
            ) from error

    def _unreadable(self, path: str, error: OSError, tensors: str = "") -> SyncError:
        return SyncError(
            f"{path} cannot be read: {error.strerror or error}{tensors}.",
            "It is missing, is a link, or is not readable for the engine.",
            "Let nothing else write there, and sync again.",
        )

    def _tensors_of(self, number: int) -> str:
        tensors = self._listed[number].tensors
        if not tensors:
            return ""
        return f" (it holds {tensors[0].name}" + (f" and {len(tensors) - 1} more)" if tensors[1:] else ")")

    def _cut_short(self, number: int, size: int) -> str:
        """The first tensor, in file order, that does not lie whole within `size` bytes."""
        stored = self._files[number]
        layout = self._plan.buckets[number]
        for position in stored.order:
            if stored.starts[position] + layout.entries[position].nbytes > size:
                return f"; {self._listed[number].tensors[position].name} is not whole"
        return ""


@contextlib.contextmanager
def _lane_folder(path: str) -> Iterator[int]:
    if not PurePath(path).is_absolute():
        raise ProtocolError(f"The plan's folder {path!r} is not an absolute path.")
    try:
        descriptor = open_private_folder(path)
    except OSError as error:
        raise ProtocolError(
            f"The lane's folder {path} cannot be opened: {error.strerror}.",
            "Trainer and engine see different file systems, or run as different users.",
            "Pass connect(folder=...) a folder that both see, or choose another transport.",
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
