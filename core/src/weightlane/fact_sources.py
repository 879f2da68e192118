"""Where facts of an engine come from: plugins that register it, then the metadata of what is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.contexts import EndpointContext, FactsContext
from weightlane.errors import EngineError, WeightlaneError
from weightlane.facts import SOURCE_QUALITY, EngineFacts, no_facts
from weightlane.installations import find_distribution
from weightlane.notices import warn_once
from weightlane.pins import with_assumed_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.contexts import RolloutTarget
    from weightlane.registry import Registry, Selected

_OPEN_SECONDS = 10.0


def collect_facts(
    registry: Registry, engine: str, target: RolloutTarget | None, search_path: tuple[str, ...] = ()
) -> EngineFacts:
    """See `Registry.collect_facts`."""
    backends = [item for item in registry.backends() if item.descriptor.engine == engine]
    found: list[EngineFacts] = []
    failures: list[WeightlaneError] = []
    for backend in {item.plugin_name: item for item in backends}.values():
        own = [item for item in backends if item.plugin_name == backend.plugin_name]
        names = (name for item in own for name in item.descriptor.distributions)
        context = FactsContext(engine, tuple(dict.fromkeys(names)), target, search_path)
        try:
            facts = registry.call_collect_facts(backend, context)
        except WeightlaneError as exc:
            failures.append(exc)
        else:
            if facts is not None and (not search_path or _is_from(facts, context)):
                found.append(facts)
    if not found and failures:
        raise failures[0]
    for failure in failures:
        warn_once(f"Facts of {engine} come from another plugin, since one failed: {failure}")
    if found:
        # Of two equally good sources the one that knows the version; then the plugins' stable order.
        best = max(found, key=lambda item: (SOURCE_QUALITY[item.source], bool(item.version)))
    elif target is not None:
        if target.address:
            _require_reachable(registry, backends, target)
        best = no_facts(engine)
    else:
        names = (name for item in backends for name in item.descriptor.distributions)
        best = installed_facts(engine, tuple(names), search_path)
    return with_assumed_version(best, registry.environ)


def installed_facts(
    engine: str, distributions: Sequence[str], search_path: Sequence[str] = ()
) -> EngineFacts:
    """Facts of an installed engine from metadata alone: its version; nothing is imported or searched for."""
    found = find_distribution(distributions, search_path)
    return (
        EngineFacts(engine=engine, version=found.version, source="installed") if found else no_facts(engine)
    )


def _require_reachable(registry: Registry, backends: Sequence[Selected], target: RolloutTarget) -> None:
    """Of an address that no plugin took for its own: why not, in the words of whoever would have to open it.

    What would be said otherwise is that no version fits, which is not what is wrong.
    """
    refusals: list[EngineError] = []
    for backend in {item.plugin_name: item for item in backends}.values():
        context = EndpointContext(backend.descriptor, target, _OPEN_SECONDS)
        try:
            registry.call_open_endpoint(backend, context).close()
        except EngineError as exc:
            refusals.append(exc)
        except WeightlaneError:
            return
        else:
            return
    if refusals:
        raise refusals[0]


def _is_from(facts: EngineFacts, context: FactsContext) -> bool:
    """Whether facts are of the environment that was asked about.

    A plugin older than `FactsContext.search_path` tells of this process's environment instead.
    """
    found = find_distribution(context.distributions, context.search_path)
    return found is not None and found.version == facts.version
