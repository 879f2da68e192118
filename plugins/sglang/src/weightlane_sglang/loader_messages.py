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


class AskedModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One module of an adapter as it was sent: rows of its lora_B, and the digest of each whole matrix."""

    module: str
    rows: int
    digest_a: str
    digest_b: str


class ReadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="read-adapter"):
    """Compare what is held under this name with what was sent."""

    name: str
    modules: tuple[AskedModule, ...]


class AdapterHeld(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="adapter-held"):
    """Answer to `ReadAdapter`: of one rank.

    `bound` are the modules whose values are in the live pool as they were sent, `others` what is held for
    modules that nobody asked for; `problems` say of each other module what is wrong with it.
    """

    rank: int
    scaling: float
    bound: tuple[str, ...]
    others: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


LoaderRequest: TypeAlias = TraceLoad | HashElements | TellReleased | ReadAdapter
LoaderReply: TypeAlias = Traced | ElementsHashed | Released | AdapterHeld | Failure
