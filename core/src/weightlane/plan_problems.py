"""Problems of a plan beyond names and shapes: duplicates, dtypes, ties, replicas that disagree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane.endpoint import ReadingBackEndpoint
from weightlane.errors import Problem
from weightlane.front.frames import MAX_FRAME_BYTES
from weightlane.manifest import DTYPE_BYTES, FLOATING
from weightlane.plan import wire_tensors
from weightlane.plan_check import check_against_expected
from weightlane.program import AgentMove
from weightlane.transports.disk_layout import stored_problems
from weightlane.types import TransportName

_FRAME_OVERHEAD = 4096

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import TrainedBase
    from weightlane.buckets import BucketLayout
    from weightlane.manifest import Manifest
    from weightlane.messages import WireTensor
    from weightlane.planning import OpenReplica
    from weightlane.program import Program
    from weightlane.receiver import ExpectedTensor, NameEntry
    from weightlane.types import MemoryTag, ReadBackPolicy, RequestPolicy


def duplicate_names(tensors: Sequence[WireTensor]) -> list[Problem]:
    """Names under which two exported tensors would travel."""
    seen: set[str] = set()
    problems: list[Problem] = []
    for tensor in tensors:
        if tensor.name in seen:
            problems.append(
                Problem("duplicate-name", tensor.name, "two exported tensors would travel under it")
            )
        seen.add(tensor.name)
    return problems


def mapped_problems(
    manifest: Manifest,
    entries: Sequence[NameEntry],
    expected: Sequence[ExpectedTensor] | None,
    *,
    receiver: str,
) -> list[Problem]:
    """What is wrong with a map of names by names, shapes and dtypes alone, of tensors under checkpoint names.

    Args:
        manifest: the agreed one.
        entries: how it is mapped.
        expected: what the receiver's checkpoint holds; None where that is not known.
        receiver: how messages call it.
    """
    sent = wire_tensors(tuple(entries), {spec.name: spec.shape for spec in manifest.tensors})
    problems = duplicate_names(sent)
    if expected is not None:
        # The checkpoint has canonical names, whatever the loader wants to be told.
        names = [entry.canonical for entry in entries if not entry.dropped]
        canonical = [replace(tensor, name=name) for tensor, name in zip(sent, names, strict=True)]
        problems += check_against_expected(canonical, expected, receiver=receiver)
    return problems + dtype_problems(manifest, entries)


def dtype_problems(manifest: Manifest, entries: Sequence[NameEntry]) -> list[Problem]:
    """Casts that no loader makes, such as int32 to float32."""
    problems: list[Problem] = []
    for spec, entry in zip(manifest.tensors, entries, strict=True):
        if entry.dropped or entry.dtype == spec.dtype:
            continue
        if entry.dtype not in DTYPE_BYTES or not {entry.dtype, spec.dtype} <= FLOATING:
            problems.append(
                Problem(
                    "dtype",
                    spec.name,
                    f"exported as {spec.dtype}, but the receiver holds {entry.dtype or 'an unknown dtype'}; "
                    "only casts between float64, float32, float16 and bfloat16 are made",
                )
            )
    return problems


def tie_problems(
    manifest: Manifest, entries: Sequence[NameEntry], expected: Sequence[ExpectedTensor], where: str
) -> list[Problem]:
    """A tensor is dropped as tied only where the trainer ties it too; its values would be lost otherwise.

    Ranks that never hold both tensors cannot tell; then the receiver's word stands.
    """
    holders = {spec.name: set(spec.holders) for spec in manifest.tensors}
    owner = {item.name: item.tied_to for item in expected if item.tied_to}
    problems: list[Problem] = []
    for entry in entries:
        target = owner.get(entry.canonical, "")
        held_together = holders[entry.canonical] & holders.get(target, set())
        tied_here = {entry.canonical, manifest.aliases.get(entry.canonical, entry.canonical)} & {
            target,
            manifest.aliases.get(target, target),
        }
        if entry.dropped and held_together and not tied_here:
            problems.append(
                Problem(
                    "tied",
                    entry.canonical,
                    f"{where} ties it to {target}, but the trainer holds it as a tensor of its own",
                    "Tie it in the trainer, or start the engine from an untied checkpoint.",
                )
            )
    return problems


def disagreements(mapped: Sequence[tuple[NameEntry, ...]], replicas: Sequence[OpenReplica]) -> list[Problem]:
    """Tensors that a later replica wants under another name or dtype than the first."""
    return [
        Problem(
            "replica-disagreement",
            mine.canonical,
            f"replica {replica.number} wants {theirs.dtype} {theirs.wire!r}, replica 0 {mine.dtype} "
            f"{mine.wire!r}",
            "Use one lane per kind of replica.",
        )
        for replica, entries in zip(replicas[1:], mapped[1:], strict=True)
        for mine, theirs in zip(mapped[0], entries, strict=True)
        if (mine.wire, mine.dtype, mine.dropped) != (theirs.wire, theirs.dtype, theirs.dropped)
    ]


def folder_problems(
    transport: TransportName | None, folder: str, entries: Sequence[NameEntry], tensors: Sequence[WireTensor]
) -> list[Problem]:
    """A folder that nothing would write to, and tensors that a safetensors file cannot hold."""
    if transport is TransportName.DISK:
        return stored_problems(tensors, [entry.canonical for entry in entries if not entry.dropped])
    if folder:
        what = f"{folder} was named, but transport {transport.value if transport else 'None'} was asked for"
        return [Problem("transport", "folder", what, "Pass transport='disk' too, or leave folder out.")]
    return []


def frame_problems(
    program: Program, buckets: Sequence[BucketLayout], tensors: Sequence[WireTensor]
) -> list[Problem]:
    """Buckets that do not fit into one message by value, found before the first of them is sent."""
    if not isinstance(program.move, AgentMove) or program.move.transport != "inline":
        return []
    return [
        Problem(
            "bucket-size",
            tensors[layout.entries[0].tensor].name,
            f"its bucket has {layout.nbytes} bytes, and a message by value carries {MAX_FRAME_BYTES} at most",
            "Use transport shm, or smaller buckets where several tensors share one.",
        )
        for layout in buckets
        if layout.entries and layout.nbytes + _FRAME_OVERHEAD > MAX_FRAME_BYTES
    ]


def lost_base_problems(release: Sequence[MemoryTag], base: TrainedBase | None) -> list[Problem]:
    """Weights that are let go under an adapter, where no sync brings the base back."""
    if base is None or base.sent_by or "weights" not in release:
        return []
    what = f"an adapter's sync does not bring back the base, which would be lost: {base.not_sent}"
    return [Problem("release", "weights", what, 'Release "kv_cache" alone in this mode.')]


def memory_problems(program: Program, release: Sequence[MemoryTag], replica: OpenReplica) -> list[Problem]:
    """Memory that the lane is to let go and this backend plans no calls for."""
    planned = [item.tag for item in program.memory]
    return [
        Problem(
            "release",
            tag,
            f"backend {replica.selected.origin} plans {planned.count(tag)} pairs of calls to release and "
            f"resume it at {replica.endpoint.address}; {int(tag in release)} is asked for",
            "Leave it out of release=, or choose another engine.",
        )
        for tag in dict.fromkeys((*release, *planned))
        if planned.count(tag) != int(tag in release)
    ]


def request_problems(program: Program, wanted: RequestPolicy | None, replica: OpenReplica) -> list[Problem]:
    """A policy for requests that run which this engine cannot keep."""
    if wanted is None or program.requests == wanted:
        return []
    does = f"it keeps {program.requests}" if program.requests else "it plans nothing for them"
    what = f"requests={wanted!r} is asked for, and {replica.endpoint.address} cannot keep it: {does}"
    fix = f'Connect with requests="{program.requests}".' if program.requests else "Leave it out."
    return [Problem("running-requests", f"replica {replica.number}", what, fix)]


def read_back_problems(
    program: Program, wanted: ReadBackPolicy, untraced: str, replica: OpenReplica
) -> list[Problem]:
    """A replica that is to be read back at every sync and cannot be; `untraced` is why it has no table."""
    why = untraced
    by_request = not isinstance(program.move, AgentMove)
    if not why and by_request and not isinstance(replica.endpoint, ReadingBackEndpoint):
        why = "it takes requests only, and its endpoint cannot ask what its workers hold"
    if wanted != "always" or not why:
        return []
    what = f"{replica.endpoint.address} cannot be read back: {why}"
    return [Problem("read-back", f"replica {replica.number}", what, 'Connect with read_back="first".')]
