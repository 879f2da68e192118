"""Loads one plugin in isolation: import, register, ask for its descriptors, check it against the contract.

What fails leaves the manager as it was, on pluggy 1.6 too, where a failed `register` leaves a half-registered
plugin behind.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pluggy

from weightlane import hookspecs
from weightlane.descriptor_rules import is_version, require_sound
from weightlane.discovery import Entry, PluginState, PluginStatus
from weightlane.errors import PluginError, near_names
from weightlane.types import CORE_API_VERSION, BackendDescriptor

HOOKS: frozenset[str] = frozenset(name for name in vars(hookspecs) if name.startswith("weightlane_"))


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of one plugin; `cause` is what stopped it, `key` its name in the manager."""

    key: str
    status: PluginStatus
    descriptors: tuple[BackendDescriptor, ...] = ()
    cause: BaseException | None = None


_IMPLEMENTATION_MARK = f"{hookspecs.PROJECT}_impl"


class _Manager(pluggy.PluginManager):
    """Passes over a module's unmarked names at once; pluggy inspects each, 3 ms for a plugin."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if isinstance(plugin, ModuleType):
            member = vars(plugin).get(name)
            if not callable(member) or _IMPLEMENTATION_MARK not in getattr(member, "__dict__", ()):
                return None
        return super().parse_hookimpl_opts(plugin, name)


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the contract and no plugin."""
    manager = _Manager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_entry(manager: pluggy.PluginManager, entry: Entry) -> Loaded:
    """Imports and registers one entry point; never raises for what the plugin does wrong."""
    if entry.damage:
        return Loaded(entry.key, _with(_named(entry), "broken", entry.damage))
    try:
        plugin = entry.point.load()
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - one plugin's import must not stop the others
        return _failed(entry.key, _named(entry), exc, "its import failed")
    return register_plugin(
        manager,
        plugin,
        key=entry.key,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
    )


def register_plugin(
    manager: pluggy.PluginManager, plugin: Any, *, key: str, name: str, distribution: str, version: str
) -> Loaded:
    """Registers an imported plugin under `key`, or says why not and leaves no trace of it."""
    status = _status(name, distribution, version)
    try:
        manager.register(plugin, name=key)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - pluggy 1.6 runs a plugin's properties here
        # A plugin that is registered under another key already must keep that registration.
        if manager.get_plugin(key) is plugin:
            manager.unregister(name=key)
        return _failed(key, status, exc, "it could not be registered")
    descriptors: tuple[BackendDescriptor, ...] = ()
    try:
        descriptors = _descriptors(manager, plugin)
        newer = [item for item in descriptors if api_refusal(item)]
        if descriptors and len(newer) == len(descriptors):
            manager.unregister(name=key)
            error = api_refusal(newer[0])
            return Loaded(key, _with(status, "incompatible", error, _engines(descriptors)), descriptors)
        _check_implementations(manager, plugin)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - the plugin's own code ran
        manager.unregister(name=key)
        return _failed(key, status, exc, "it does not keep to the contract", _engines(descriptors))
    hooks = tuple(sorted(caller.name for caller in manager.get_hookcallers(plugin) or ()))
    active = PluginStatus(name, distribution, version, "active", hooks=hooks, engines=_engines(descriptors))
    return Loaded(key, active, descriptors)


def api_refusal(descriptor: BackendDescriptor) -> str:
    """Why this core cannot serve a backend written for that contract version; "" when it can."""
    wanted, have = descriptor.api_version, CORE_API_VERSION
    if len(wanted) == len(have) and wanted[0] == have[0] and wanted[1] <= have[1]:
        return ""
    side = "older" if tuple(wanted[:1]) < have[:1] else "newer"
    return (
        f"{descriptor.name} was written for weightlane contract {_dotted(wanted)}, which is {side} than this "
        f"core's {_dotted(have)}; install {'a newer plugin' if side == 'older' else 'a newer weightlane'}"
    )


def _descriptors(manager: pluggy.PluginManager, plugin: Any) -> tuple[BackendDescriptor, ...]:
    """What this one plugin registers: others' implementations, wrappers too, have no say in it."""
    others = manager.get_plugins() - {plugin}
    answers = manager.subset_hook_caller("weightlane_register_backends", others)()
    found: list[BackendDescriptor] = []
    for answer in answers:
        if not isinstance(answer, Iterable):
            raise PluginError(f"weightlane_register_backends returned {type(answer).__name__}, not a list.")
        for item in answer:
            if not isinstance(item, BackendDescriptor):
                raise PluginError(
                    f"weightlane_register_backends gave a {type(item).__name__}, not a BackendDescriptor."
                )
            if not (is_version(item.api_version) and api_refusal(item)):
                require_sound(item)  # one of another contract version may have other fields
            found.append(item)
    seen: set[tuple[str, str]] = set()
    for item in found:
        if (item.name, item.era) in seen:
            raise PluginError(f"Backend {item.name} of era {item.era} is registered twice by this plugin.")
        seen.add((item.name, item.era))
    return tuple(found)


def _check_implementations(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Finds hooks that would silently never run, or run differently from one pluggy to the next."""
    for caller in manager.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            if impl.plugin is not plugin:
                continue
            if not caller.has_spec():
                if impl.optionalhook:
                    continue
                near = near_names(caller.name, HOOKS, limit=1)
                hint = f"did you mean {near[0]}?" if near else f"the hooks are {', '.join(sorted(HOOKS))}"
                raise PluginError(f"It implements {caller.name}, which is no hook of weightlane:", hint)
            if impl.opts.get("specname"):
                raise PluginError(
                    f"It implements {caller.name} by specname.",
                    "pluggy 1.6 cannot exclude such an implementation when another backend is chosen.",
                    f"Name the function {caller.name}.",
                )
            for argument in _odd_arguments(impl.function):
                raise PluginError(
                    f"Argument {argument} of {caller.name} is keyword-only or has a default.",
                    "pluggy 1.6 never passes such an argument.",
                    "Make it a plain argument.",
                )
    if isinstance(plugin, ModuleType):
        for name in sorted(HOOKS & vars(plugin).keys()):
            function = vars(plugin)[name]
            if inspect.isfunction(function) and not hasattr(function, _IMPLEMENTATION_MARK):
                raise PluginError(f"{name} is not marked with @hookimpl and would never be called.")


def _odd_arguments(function: Any) -> list[str]:
    code = getattr(function, "__code__", None)
    is_plain = code is not None and not code.co_kwonlyargcount and not function.__defaults__
    if is_plain and not hasattr(function, "__wrapped__"):
        return []  # spares a signature, which takes longer than all else here
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    ]


def _named(entry: Entry) -> PluginStatus:
    return _status(entry.name, entry.distribution, entry.version)


def _status(name: str, distribution: str, version: str) -> PluginStatus:
    return PluginStatus(name, distribution, version, "broken")


def _failed(
    key: str, status: PluginStatus, cause: BaseException, what: str, engines: tuple[str, ...] = ()
) -> Loaded:
    text = str(cause).strip() or "no message"
    detail = text if isinstance(cause, PluginError) else f"{type(cause).__name__}: {text}"
    return Loaded(key, _with(status, "broken", f"{what}: {detail}", engines), cause=cause)


def _with(
    status: PluginStatus, state: PluginState, error: str, engines: tuple[str, ...] = ()
) -> PluginStatus:
    return PluginStatus(status.name, status.distribution, status.version, state, error, engines=engines)


def _engines(descriptors: Iterable[BackendDescriptor]) -> tuple[str, ...]:
    return tuple(sorted({item.engine for item in descriptors}))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
