"""Which plugins are there: sorted entry points, what is denied, which names clash. Imports no plugin."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Literal, TypeAlias

from weightlane.declared import declaring, normalized
from weightlane.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane.declared import Declared

GROUP = "weightlane"
DISABLE_VARIABLE = "WEIGHTLANE_DISABLE_PLUGINS"
STRICT_VARIABLE = "WEIGHTLANE_STRICT_PLUGINS"

PluginState: TypeAlias = Literal["active", "disabled", "conflict", "incompatible", "broken"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point of group `weightlane` and the distribution that declares it; not imported yet.

    `damage` says why it cannot even be tried: metadata that an interrupted install left behind, or an entry
    that names no module.
    """

    name: str
    distribution: str
    version: str
    point: EntryPoint
    damage: str = ""

    @property
    def key(self) -> str:
        """The name under which the plugin is registered: unlike `name`, no other distribution can take it."""
        return f"{self.distribution}:{self.name}"


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """How one plugin fared.

    `name` is its entry point's name, `error` says in a sentence why it is not active. `hooks` lists what it
    implements and `engines` what it registers, as far as that became known.
    """

    name: str
    distribution: str
    version: str
    state: PluginState
    error: str = ""
    hooks: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name under which the plugin is registered: `Selected.plugin_name` of its backends."""
        return f"{self.distribution}:{self.name}"

    @property
    def title(self) -> str:
        """Name, distribution and version, for messages."""
        return f"{self.name} of {self.distribution} {self.version}".rstrip()

    @property
    def sentence(self) -> str:
        """What became of the plugin, without a full stop."""
        state = "in conflict" if self.state == "conflict" else self.state
        return f"{self.title} is {state}: {self.error}".removesuffix(": ")


@dataclass(frozen=True, slots=True)
class DenyList:
    """Names from `WEIGHTLANE_DISABLE_PLUGINS`: entry points or distributions; `*` denies all."""

    names: frozenset[str]

    def denies(self, entry: Entry) -> bool:
        """Whether this entry must not be imported."""
        return bool(self.names & {"*", normalized(entry.name), normalized(entry.distribution)})

    def unknown(self, entries: Sequence[Entry]) -> tuple[str, ...]:
        """Names that deny nothing that is installed: likely misspelt."""
        known = {normalized(entry.name) for entry in entries}
        known |= {normalized(entry.distribution) for entry in entries}
        return tuple(sorted(self.names - known - {"*"}))


def deny_list(environ: Mapping[str, str]) -> DenyList:
    """The names that the environment disables."""
    words = (word.strip() for word in environ.get(DISABLE_VARIABLE, "").split(","))
    return DenyList(frozenset(word if word == "*" else normalized(word) for word in words if word))


def is_strict(environ: Mapping[str, str]) -> bool:
    """Whether a plugin that cannot be used is an error at once."""
    return environ.get(STRICT_VARIABLE, "").strip().lower() not in {"", "0", "false", "no", "off"}


def find_entries() -> tuple[Entry, ...]:
    """Every entry point of group `weightlane`, sorted, since their own order is that of folders on disk."""
    entries: dict[str, list[Entry]] = {}
    for found in declaring(GROUP):
        try:
            name, version = found.head()
            if name not in entries:
                entries[name] = _entries_of(found, name, version)
        except ValueError as exc:
            damaged = _damaged(found, str(exc))
            entries.setdefault(damaged.distribution, [damaged])
    every = (entry for group in entries.values() for entry in group)
    return tuple(sorted(every, key=lambda entry: (entry.name, entry.distribution, entry.point.value)))


def _entries_of(found: Declared, name: str, version: str) -> list[Entry]:
    if found.rival:
        raise ValueError(f"{found.rival} stands beside it")
    return [Entry(point.name, name, version, point, _damage_of(point)) for point in found.points(GROUP)]


def _damage_of(point: EntryPoint) -> str:
    if point.pattern.match(point.value):
        return ""
    return f"its entry point is {point.value!r}, and must be a module or module:object"


def _damaged(found: Declared, reason: str) -> Entry:
    """Stands for a distribution whose metadata cannot be used, under the name of its folder."""
    stem = found.folder.removesuffix(".dist-info").removesuffix(".egg-info")
    name, _, version = stem.partition("-")
    own = normalized(name) or "unnamed"
    damage = f"its metadata in {found.folder or 'an unnamed folder'} is damaged ({reason}); install it again"
    return Entry(own, own, version, EntryPoint(own, "", GROUP), damage)


def clashing_names(entries: Sequence[Entry]) -> dict[str, tuple[Entry, ...]]:
    """Entry names that more than one entry claims, with all of their claimants."""
    counts = Counter(entry.name for entry in entries)
    return {
        name: tuple(entry for entry in entries if entry.name == name)
        for name, count in counts.items()
        if count > 1
    }


def not_usable(status: PluginStatus) -> PluginError:
    """The error of asking for a plugin that is not active; raise it from the plugin's own cause."""
    fixes: dict[PluginState, str] = {
        "disabled": "Take it out of WEIGHTLANE_DISABLE_PLUGINS.",
        "conflict": "Uninstall or disable one of them, or pin one.",
        "incompatible": f"Install matching versions: pip install -U weightlane {status.distribution}.",
        "broken": f"Reinstall it, or report it to its authors: pip install -U {status.distribution}.",
    }
    return PluginError(
        f"Plugin {status.sentence.rstrip('.')}.",
        "It was asked for, and nothing is chosen in its place.",
        fixes.get(status.state, ""),
    )
