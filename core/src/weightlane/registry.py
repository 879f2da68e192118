"""The plugins of this process: which there are, how each fared, what they register.

Every process loads its own registry, on first use and never at import. Names and typed messages cross process
borders, plugin objects do not.
"""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlane.declared import normalized
from weightlane.discovery import (
    DISABLE_VARIABLE,
    Entry,
    PluginState,
    PluginStatus,
    clashing_names,
    deny_list,
    find_entries,
    is_strict,
    not_usable,
)
from weightlane.errors import PluginError, SelectionError, near_names
from weightlane.hook_calls import HookCalls, Selected
from weightlane.load_report import require_usable, warn_of_stray_pins, warn_of_unusable
from weightlane.loading import Loaded, load_entry, new_manager, register_plugin
from weightlane.lock_check import require_origin
from weightlane.lock_keeper import LockKeeper
from weightlane.notices import PluginWarning, warn_once
from weightlane.pins import Pin, engine_key, find_pins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pluggy

    from weightlane.contexts import RolloutTarget
    from weightlane.facts import EngineFacts


class Registry(HookCalls):
    """Plugins, their states and their hooks.

    `Registry().load()` finds installed plugins; tests start from an empty one and `register`. Of the
    environment it reads `WEIGHTLANE_DISABLE_PLUGINS`, `WEIGHTLANE_STRICT_PLUGINS`, `WEIGHTLANE_LOCKED`,
    `WEIGHTLANE_PIN_<ENGINE>` and `WEIGHTLANE_ASSUME_<ENGINE>_VERSION`; of the folder `project`, pins in its
    pyproject.toml.

    Args:
        manager: holds the plugins; a fresh one when None.
        environ: stands in for the process's environment.
        project: the folder whose pyproject.toml may hold pins; the working directory when None.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        project: Path | None = None,
    ) -> None:
        super().__init__(new_manager() if manager is None else manager)
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.pins: Mapping[str, Pin] = find_pins(self.environ, Path.cwd() if project is None else project)
        self._loaded: dict[str, Loaded] = {}
        self._conflicts: dict[str, Entry] = {}
        self._is_loaded = False
        # Bounded by the imports of plugins, which alone run under it.
        self._lock = threading.RLock()
        self.locks = LockKeeper(self.environ)

    # -- loading ------------------------------------------------------------------------------------------

    def load(self) -> Registry:
        """Loads every installed plugin that is not disabled, each in isolation. Idempotent.

        Raises:
            PluginError: `WEIGHTLANE_STRICT_PLUGINS` is set and a plugin cannot be used.
        """
        with self._lock:
            if not self._is_loaded:
                self._is_loaded = True
                self._load_entries(find_entries())
                if not is_strict(self.environ):  # where they are an error instead
                    warn_of_unusable(self._loaded.values())
                warn_of_stray_pins(self.pins, self.engines())
            if is_strict(self.environ):
                require_usable(self._loaded.values())
        return self

    def register(
        self, plugin: Any, *, name: str, distribution: str = "in-process", version: str = ""
    ) -> PluginStatus:
        """Adds a plugin object that no entry point names, under the same rules; gives its status."""
        with self._lock:
            key = f"{normalized(distribution)}:{name}"
            if key in self._loaded:
                raise PluginError(
                    f"Plugin {name} of {distribution} is registered already.",
                    "A name stands for one plugin.",
                    "Register it once, or under another name.",
                )
            loaded = register_plugin(
                self._manager,
                plugin,
                key=key,
                name=name,
                distribution=normalized(distribution),
                version=version,
            )
            self._loaded[key] = loaded
            return loaded.status

    def admit(self, distribution: str, entry: str = "") -> None:
        """Loads the side of a name conflict that a pin has chosen; the others stay out."""
        with self._lock:
            for key, found in list(self._conflicts.items()):
                if found.distribution == normalized(distribution) and entry in {"", found.name}:
                    del self._conflicts[key]
                    self._loaded[key] = load_entry(self._manager, found)

    def _load_entries(self, entries: Sequence[Entry]) -> None:
        denied = deny_list(self.environ)
        for name in denied.unknown(entries):
            near = near_names(name, [word for item in entries for word in (item.name, item.distribution)])
            if near:
                warn_once(
                    f"{DISABLE_VARIABLE} names {name}, which is not installed; near: {', '.join(near)}."
                )
        allowed = [entry for entry in entries if not denied.denies(entry)]
        clashes = clashing_names(allowed)
        for entry in entries:
            if denied.denies(entry):
                self._hold_back(entry, "disabled", f"{DISABLE_VARIABLE} names it")
            elif entry.name in clashes and not self._pin_settles(entry, clashes[entry.name]):
                claimants = ", ".join(f"{item.distribution} {item.version}" for item in clashes[entry.name])
                if sum(item.key == entry.key for item in clashes[entry.name]) == 1:
                    self._conflicts[entry.key] = entry
                self._hold_back(
                    entry,
                    "conflict",
                    f"entry point {entry.name} is claimed by {claimants}; uninstall or disable one, or pin "
                    f"one: WEIGHTLANE_PIN_{engine_key(entry.name)}={entry.distribution}",
                )
            else:
                self._loaded[entry.key] = load_entry(self._manager, entry)

    def _pin_settles(self, entry: Entry, claimants: Sequence[Entry]) -> bool:
        """Whether pins choose this entry and no other claimant of its name."""
        own = self.pins.get(engine_key(entry.name))
        pins = [own] if own is not None else list(self.pins.values())
        chosen = [item for item in claimants if any(pin.names(item.distribution, item.name) for pin in pins)]
        return chosen == [entry]

    def _hold_back(self, entry: Entry, state: PluginState, error: str) -> None:
        status = PluginStatus(entry.name, entry.distribution, entry.version, state, error)
        self._loaded[entry.key] = Loaded(entry.key, status)

    def under_lock(self, path: Path) -> Registry:
        """This registry, plugins and all, refusing whatever the lock at `path` does not name.

        Raises:
            LockError: the lock cannot be used.
        """
        held = copy.copy(self)
        held.locks = LockKeeper(self.environ, path)
        if held.locks.held is None:
            raise AssertionError("a lock that was read is held")
        return held

    def without_lock(self) -> Registry:
        """This registry, plugins and all, under no lock, not even the environment's."""
        free = copy.copy(self)
        free.locks = LockKeeper({})
        return free

    # -- what is there ------------------------------------------------------------------------------------

    def statuses(self) -> tuple[PluginStatus, ...]:
        """Every plugin found, in any state, by entry point and distribution."""
        return tuple(
            sorted((item.status for item in self._loaded.values()), key=lambda s: (s.name, s.distribution))
        )

    def cause_of(self, status: PluginStatus) -> BaseException | None:
        """What stopped a broken plugin, to be raised from when it is chosen."""
        return next((item.cause for item in self._loaded.values() if item.status == status), None)

    def backends(self) -> tuple[Selected, ...]:
        """Every backend of every active plugin, one per era, in a stable order; nothing is selected yet."""
        return self._registered("active")

    def refused_backends(self) -> tuple[Selected, ...]:
        """Backends whose plugin got as far as registering them and then was refused."""
        return self._registered("incompatible")

    def engines(self) -> tuple[str, ...]:
        """Engines that an active plugin registers."""
        return tuple(sorted({item.descriptor.engine for item in self.backends()}))

    def _registered(self, state: str) -> tuple[Selected, ...]:
        found = [
            Selected(descriptor, item.key, item.status.distribution, item.status.version)
            for item in self._loaded.values()
            if item.status.state == state
            for descriptor in item.descriptors
        ]
        return tuple(
            sorted(
                found, key=lambda s: (s.descriptor.role, s.descriptor.name, s.distribution, s.descriptor.era)
            )
        )

    def status_of(self, backend: Selected) -> PluginStatus:
        """The status of the plugin behind a backend."""
        return self._loaded[backend.plugin_name].status

    def owner_of(self, plugin_name: str) -> tuple[str, str]:
        """Distribution and version of the plugin registered under this name."""
        known = self._loaded.get(plugin_name)
        if known is None:  # of a manager that was handed in
            return super().owner_of(plugin_name)
        return known.status.distribution, known.status.version

    def backend_named(self, name: str) -> Selected | None:
        """The backend that another process selected, by backend name or by `Selected.reference`.

        Raises:
            PluginError: the plugin of that name is here and cannot be used.
            SelectionError: several backends have that name; a reference is needed.
            LockError: a lock is in force, and it names this backend in another version or not at all.
        """
        found = [item for item in self.backends() if name in {item.descriptor.name, item.reference}]
        if len(found) > 1:
            raise SelectionError(
                f"Backend name {name} stands for {len(found)} backends here.",
                f"They are {', '.join(item.origin for item in found)}.",
                f"Name one by its reference, such as {found[0].reference}.",
            )
        if found:
            held = self.locks.held
            if held is not None:
                require_origin(held, self, found[0])
            return found[0]
        for item in self._loaded.values():
            distribution = item.status.distribution
            if item.status.state != "active" and (
                name == item.status.name or name.startswith(f"{distribution}/")
            ):
                raise not_usable(item.status) from item.cause
        return None

    def collect_facts(
        self, engine: str, target: RolloutTarget | None = None, *, search_path: Sequence[str] = ()
    ) -> EngineFacts:
        """Facts of one engine, from the best source that any plugin registering it reaches.

        Without a target, an engine that no plugin describes is looked up by its distributions' metadata. With
        one, what is installed here says nothing of it, so facts without a version come back. A version that
        the user assumes (`WEIGHTLANE_ASSUME_<ENGINE>_VERSION`) replaces the one found.

        Args:
            engine: the engine's name.
            target: a live engine to ask; None looks at what is installed.
            search_path: folders of another environment of this machine, in which to look instead.

        Raises:
            WeightlaneError: no plugin gave facts, and one failed; the first failure.
        """
        from weightlane.fact_sources import collect_facts

        return collect_facts(self, engine, target, tuple(search_path))


_process_registry: Registry | None = None
# Bounded by the same imports: the first caller loads, the others wait for it.
_process_lock = threading.Lock()


def get_registry() -> Registry:
    """This process's registry, loaded on the first call.

    Raises:
        PluginError: `WEIGHTLANE_STRICT_PLUGINS` is set and a plugin cannot be used.
        PinError: a pin of the environment or of ./pyproject.toml cannot be read.
    """
    global _process_registry  # noqa: PLW0603 - one registry per process is the point
    with _process_lock:
        if _process_registry is None:
            _process_registry = Registry().load()
        return _process_registry


__all__ = [
    "PluginStatus",
    "PluginWarning",
    "Registry",
    "Selected",
    "get_registry",
    "warn_once",
]
