"""What the controller asks of the code inside a server, and what each rank answers. msgpack, never pickle."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightlane.failures import Failure
from weightlane.messages import WireTensor
from weightlane.trace.table import LiveHashes, PlacementTable

MOST_REQUEST_BYTES = 64 << 20


class TraceLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace-load"):
    """Run the model's own loader over stand-ins for these tensors."""

    tensors: tuple[WireTensor, ...]


class Traced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="traced"):
    """Answer to `TraceLoad`: one rank's table, and what memory it has released as far as that is known."""

    table: PlacementTable
    released: tuple[str, ...] = ()


class HashElements(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hash-elements"):
    """Hash what the model holds where tables say; `tables` has, per rank, the digest of one that it gave."""

    tables: tuple[str, ...]


class ElementsHashed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="elements-hashed"):
    """Answer to `HashElements`: of one rank."""

    hashes: LiveHashes


class TellReleased(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tell-released"):
    """Tell what memory the scheduler has let go of and not taken back."""


class Released(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="released"):
    """Answer to `TellReleased`: the scheduler's own tags, None where it keeps none that we know of."""

    tags: tuple[str, ...] | None


LoaderRequest: TypeAlias = TraceLoad | HashElements | TellReleased
LoaderReply: TypeAlias = Traced | ElementsHashed | Released | Failure
