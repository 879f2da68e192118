"""Whether a model still is what its manifest said at connect: what was added to it since would go nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weightlane.manifest import Manifest, TensorSpec
    from weightlane.receiver import NameEntry


class Made(Protocol):
    """What is told of a tensor of an export; a recipe is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> str:
        """As it is exported."""


def require_as_announced(
    manifest: Manifest,
    entries: Sequence[NameEntry],
    now: Mapping[str, Made],
    aliases: Callable[[], Mapping[str, str]],
    *,
    rank: int,
) -> None:
    """Raises ExportError when tensors came, went or changed since connect, or are no longer tied.

    Args:
        manifest: the agreed one.
        entries: its name map. Of two tied tensors one may be left out, and then both must be one still.
        now: what this rank exports now, by name. It may hold less than all: holders are in the manifest.
        aliases: the names of it that are another's tensor now; asked only where it matters.
        rank: this rank.
    """
    for spec, entry in zip(manifest.tensors, entries, strict=True):
        if not entry.dropped and (not spec.holders or rank in spec.holders):
            _require(spec, now.get(spec.name), rank)
    known = {spec.name for spec in manifest.tensors}
    added = [name for name in now if name not in known]
    if added:
        raise _changed(
            f"{added[0]} and {len(added) - 1} more tensors are on rank {rank}, but were not in the manifest."
        )
    dropped = {entry.canonical for entry in entries if entry.dropped}
    tied = [
        (name, owner)
        for name, owner in manifest.aliases.items()
        if {name, owner} <= now.keys() and not dropped.isdisjoint((name, owner))
    ]
    same = aliases() if tied else {}
    for name, owner in tied:
        if {name, same.get(name, name)}.isdisjoint((owner, same.get(owner, owner))):
            raise _changed(f"{name} is no longer {owner} on rank {rank}, and only one of them is sent.")


def _require(spec: TensorSpec, found: Made | None, rank: int) -> None:
    was = f"{spec.dtype}{list(spec.shape)}"
    now = "gone" if found is None else f"{found.dtype}{list(found.shape)}"
    if now != was:
        raise _changed(f"{spec.name} is {now} on rank {rank}, but was {was} in the manifest.")


def _changed(what: str) -> ExportError:
    return ExportError(what, "The model was changed after connect.", "Close the lane and connect again.")
