"""Distributions here that declare plugins, found by the text of their metadata and one at a time.

`importlib.metadata.entry_points` parses the entry points of all that is installed, which takes 100 ms where a
few hundred distributions are, and one damaged file among them stops it for all.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import DistributionFinder, EntryPoint, MetadataPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import Distribution

_SUFFIXES = (".dist-info", ".egg-info")


def normalized(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it; packaging would take 40 ms to import for this."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass(frozen=True, slots=True)
class Declared:
    """A distribution whose entry points hold the group; `folder` is that of its metadata, for messages.

    `rival` names a second folder of metadata for the same distribution beside it, in another version.
    """

    folder: str
    metadata: str
    entry_points: str
    rival: str = ""

    def head(self) -> tuple[str, str]:
        """Name, normalized, and version. Only the head is read: a parser would take the README too.

        Raises:
            ValueError: its metadata has no name.
        """
        fields: dict[str, str] = {}
        for line in self.metadata.splitlines():
            if not line.strip():
                break
            field, _, value = line.partition(":")
            fields.setdefault(field.strip().lower(), value.strip())
        if not fields.get("name"):
            raise ValueError("METADATA names no distribution")
        return normalized(fields["name"]), fields.get("version", "")

    def points(self, group: str) -> list[EntryPoint]:
        """Its entry points of one group.

        Raises:
            ValueError: a line of that group is no entry.
        """
        found: list[EntryPoint] = []
        section = ""
        for line in map(str.strip, self.entry_points.splitlines()):
            if line.startswith("[") and line.endswith("]"):
                section = line[1:-1]
            elif section == group and line and not line.startswith("#"):
                name, is_entry, value = (part.strip() for part in line.partition("="))
                if not is_entry or not name:
                    raise ValueError(f"entry_points.txt has the line {line!r}, which is no entry")
                found.append(EntryPoint(name, value, group))
        return found


def declaring(group: str) -> Iterator[Declared]:
    """Distributions with entry points of `group`; of one name the first on the path, as imports have it."""
    seen: set[str] = set()
    for place in dict.fromkeys(entry or os.curdir for entry in sys.path):
        here = _names_in(place)
        for name, folders in here.items():
            if name in seen:
                continue
            for folder in folders:
                path = os.path.join(place, folder)  # noqa: PTH118 - pathlib takes three times as long
                entries = _text(path, "entry_points.txt")
                if f"[{group}]" in entries:
                    metadata = _text(path, "METADATA") or _text(path, "PKG-INFO")
                    yield Declared(folder, metadata, entries, _rival(folder, folders))
                    break
        seen |= here.keys()
        if os.path.isfile(place):  # noqa: PTH113 - a zip file on the path
            context = DistributionFinder.Context(path=[place])
            yield from _declared_by(MetadataPathFinder.find_distributions(context), group)
    for finder in sys.meta_path:
        find = getattr(finder, "find_distributions", None)
        if find is not None and getattr(finder, "__module__", "") != "_frozen_importlib_external":
            yield from _declared_by(find(DistributionFinder.Context()), group)


def _names_in(place: str) -> dict[str, list[str]]:
    """Metadata folders of one place on the path, sorted, by the name of their distribution."""
    try:
        folders = sorted(folder for folder in os.listdir(place) if folder.endswith(_SUFFIXES))  # noqa: PTH208
    except OSError:
        return {}
    names: dict[str, list[str]] = {}
    for folder in folders:
        names.setdefault(normalized(folder[: -len(_SUFFIXES[0])].partition("-")[0]), []).append(folder)
    return names


def _rival(folder: str, folders: list[str]) -> str:
    """Another version's metadata in the same place: of an interrupted upgrade, and neither can be trusted."""
    own = _version_of(folder)
    others = [other for other in folders if _version_of(other) not in {own, ""}]
    return others[0] if own and others else ""


def _version_of(folder: str) -> str:
    return folder[: -len(_SUFFIXES[0])].partition("-")[2].partition("-")[0]


def _text(path: str, name: str) -> str:
    try:
        with open(os.path.join(path, name), "rb") as file:  # noqa: PTH118, PTH123 - as above
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _declared_by(found: Iterable[Distribution], group: str) -> Iterator[Declared]:
    for item in found:
        entries = item.read_text("entry_points.txt") or ""
        if f"[{group}]" in entries:
            metadata = item.read_text("METADATA") or item.read_text("PKG-INFO") or ""
            yield Declared(str(getattr(item, "_path", "")).rpartition("/")[2], metadata, entries)
