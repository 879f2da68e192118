"""The manifest of a version on disk: the lane's own manifest, and what each file holds, with digests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import ProtocolError, SyncError, VerificationError
from weightlane.manifest import Manifest
from weightlane.transports.disk_layout import MANIFEST_NAME, STORED_DTYPES, StoredBucket, store_bucket

if TYPE_CHECKING:
    from weightlane.messages import ReceiveDisk, ReceivePlan

FORMAT = 1


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: its canonical name, the name for the receiver's loader, and the xxh3 of its bytes."""

    name: str
    wire: str
    shape: tuple[int, ...]
    dtype: str
    digest: str


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bucket's file; `tensors` in plan order."""

    name: str
    nbytes: int
    tensors: tuple[StoredTensor, ...]


class FolderManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in one version's folder.

    `manifest` is the agreed export of all ranks, the same object over every transport. `digest` is over all
    travelling bytes in plan order, as over every transport ("" below level `digest`).
    """

    format: int
    lane: str
    plan_digest: str
    sync: int
    version: int
    manifest: Manifest
    files: tuple[StoredFile, ...]
    digest: str

    def encoded(self) -> bytes:
        """The manifest as JSON, for people as well."""
        return msgspec.json.encode(self)


def read_manifest(data: bytes, where: str) -> FolderManifest:
    """The manifest in these bytes.

    Raises:
        ProtocolError: they are truncated, or not a manifest of this weightlane.
    """
    try:
        found = msgspec.json.decode(data, type=FolderManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"{where} could not be read as a manifest: {error}.",
            "It is truncated, or comes from another weightlane version or a stranger.",
            "Install the same weightlane on both sides and sync again.",
        ) from error
    if found.format != FORMAT:
        raise ProtocolError(
            f"{where} has format {found.format}; this worker reads format {FORMAT}.",
            "Trainer and engine run different versions of weightlane.",
            "Install the same weightlane on both sides.",
        )
    return found


def require_this_sync(found: FolderManifest, request: ReceiveDisk, where: str) -> None:
    """Raises SyncError where the folder holds another lane's, sync's or version's weights, or a plan's."""
    told = [
        f"{what} {got}, not {wanted}"
        for what, got, wanted in (
            ("lane", found.lane, request.lane),
            ("sync", found.sync, request.sync),
            ("version", found.version, request.version),
            ("plan", found.plan_digest, request.plan_digest),
        )
        if got != wanted
    ]
    if told:
        raise SyncError(
            f"{where} is of {', '.join(told)}.",
            "The folder was overwritten or mixed up since the trainer wrote it.",
            "Let one lane alone write there, and sync again.",
        )


def files_as_planned(found: FolderManifest, plan: ReceivePlan, where: str) -> tuple[StoredBucket, ...]:
    """Every bucket's file, once each listed file and tensor is known to be the plan's.

    Raises:
        VerificationError: names the first file and tensor that differ.
    """
    if len(found.files) != len(plan.buckets):
        raise VerificationError(
            f"{where} lists {len(found.files)} files, but the plan has {len(plan.buckets)} buckets.",
            "It was not written for this plan.",
        )
    return tuple(_file_as_planned(file, number, plan, where) for number, file in enumerate(found.files))


def _file_as_planned(file: StoredFile, number: int, plan: ReceivePlan, where: str) -> StoredBucket:
    wires = [plan.tensors[entry.tensor] for entry in plan.buckets[number].entries]
    for wire, stored in zip(wires, file.tensors, strict=False):
        mine = (wire.name, wire.shape, wire.dtype)
        theirs = (stored.wire, stored.shape, stored.dtype)
        if mine != theirs or wire.dtype not in STORED_DTYPES:
            raise VerificationError(
                f"{where} says that {file.name} holds {stored.dtype}{list(stored.shape)} {stored.wire!r} "
                f"where the plan has {wire.dtype}{list(wire.shape)} {wire.name!r}.",
                "It was not written for this plan.",
            )
    if len(wires) != len(file.tensors):
        extra = file.tensors[len(wires) :]
        which = f"{extra[0].wire} too many" if extra else f"{wires[len(file.tensors)].name} missing"
        raise VerificationError(
            f"{where} lists {len(file.tensors)} tensors in {file.name}, the plan has {len(wires)}: {which}.",
            "It was not written for this plan.",
        )
    stored_bucket = store_bucket(number, len(plan.buckets), wires, [item.name for item in file.tensors])
    if (file.name, file.nbytes) != (stored_bucket.name, stored_bucket.nbytes):
        raise VerificationError(
            f"{where} lists {file.name!r} with {file.nbytes} bytes where the plan needs {stored_bucket.name} "
            f"with {stored_bucket.nbytes}.",
            "It was not written for this plan.",
        )
    return stored_bucket


__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "FolderManifest",
    "StoredFile",
    "StoredTensor",
    "files_as_planned",
    "read_manifest",
    "require_this_sync",
]
