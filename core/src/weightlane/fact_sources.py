"""Where facts of an engine come from: plugins that register it, then the metadata of what is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from weightlane.contexts import FactsContext
from weightlane.errors import WeightlaneError
from weightlane.facts import SOURCE_QUALITY, EngineFacts, no_facts
from weightlane.notices import warn_once
from weightlane.pins import with_assumed_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.contexts import RolloutTarget
    from weightlane.registry import Registry


def collect_facts(registry: Registry, engine: str, target: RolloutTarget | None) -> EngineFacts:
    """See `Registry.collect_facts`."""
    backends = [item for item in registry.backends() if item.descriptor.engine == engine]
    found: list[EngineFacts] = []
    failures: list[WeightlaneError] = []
    for backend in {item.plugin_name: item for item in backends}.values():
        own = [item for item in backends if item.plugin_name == backend.plugin_name]
        names = (name for item in own for name in item.descriptor.distributions)
        context = FactsContext(engine, tuple(dict.fromkeys(names)), target)
        try:
            facts = registry.call_collect_facts(backend, context)
        except WeightlaneError as exc:
            failures.append(exc)
        else:
            found += [facts] if facts is not None else []
    if not found and failures:
        raise failures[0]
    for failure in failures:
        warn_once(f"Facts of {engine} come from another plugin, since one failed: {failure}")
    if found:
        # Of two equally good sources the one that knows the version; then the plugins' stable order.
        best = max(found, key=lambda item: (SOURCE_QUALITY[item.source], bool(item.version)))
    elif target is not None:
        best = no_facts(engine)
    else:
        best = installed_facts(engine, [name for item in backends for name in item.descriptor.distributions])
    return with_assumed_version(best, registry.environ)


def installed_facts(engine: str, distributions: Sequence[str]) -> EngineFacts:
    """Facts of an installed engine from metadata alone: its version; nothing is imported or searched for."""
    for name in distributions:
        try:
            return EngineFacts(engine=engine, version=version(name), source="installed")
        except PackageNotFoundError:
            continue
    return no_facts(engine)
