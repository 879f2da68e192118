"""What selection says when it chooses nothing: every candidate with its reason, near names, what to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from weightlane.catalogue import PUBLISHED, install_command
from weightlane.discovery import not_usable
from weightlane.errors import PinError, SelectionError, near_names
from weightlane.pins import assume_variable, engine_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.candidates import Verdict
    from weightlane.discovery import PluginStatus
    from weightlane.pins import Pin
    from weightlane.registry import Registry
    from weightlane.types import Role


def claimants(registry: Registry, engine: str) -> tuple[PluginStatus, ...]:
    """Plugins that are not active and, by their name or descriptors, serve this engine."""
    return tuple(
        status
        for status in registry.statuses()
        if status.state != "active" and (status.name == engine or engine in status.engines)
    )


def raise_unmet_pin(
    registry: Registry, pin: Pin, role: Role, engine: str, verdicts: Sequence[Verdict]
) -> NoReturn:
    """Raises the `PinError` of a pinned plugin none of whose backends fits."""
    why = _lines(verdicts) or f"{pin.distribution} registers no {role} backend for {engine}."
    unusable = [
        item
        for item in registry.statuses()
        if pin.names(item.distribution, item.name) and item.state != "active"
    ]
    if unusable and not verdicts:  # one of its other plugins may be the one that was meant
        why = f"{why} {' '.join(f'{item.sentence}.' for item in unusable)}"
    causes = [item.cause for item in verdicts] + [registry.cause_of(item) for item in unusable]
    cause = next((item for item in causes if item), None)
    raise PinError(
        f"The pin {pin.text} for {engine} ({pin.origin}) cannot be met.",
        why,
        "Install a version that fits, or change the pin; nothing is chosen in its place.",
    ) from cause


def raise_no_candidate(registry: Registry, role: Role, engine: str, verdicts: Sequence[Verdict]) -> NoReturn:
    """Raises the error of an engine that no backend fits.

    Raises:
        PluginError: the only plugin that stands for the engine cannot be used; its own error is the cause.
        SelectionError: otherwise.
    """
    judged = {item.backend.plugin_name for item in verdicts}
    unusable = [item for item in claimants(registry, engine) if item.key not in judged]
    if unusable and not verdicts:
        raise not_usable(unusable[0]) from registry.cause_of(unusable[0])
    lines = [_lines(verdicts)] if verdicts else _unknown(registry, role, engine)
    lines += [f"{status.sentence}." for status in unusable]
    near = [] if verdicts else [name for name in _near(registry, engine) if name != engine]
    if near:
        lines.append(f"Near: {', '.join(near)}.")
    causes = [item.cause for item in verdicts] + [registry.cause_of(item) for item in unusable]
    raise SelectionError(
        f"No {role} backend fits {engine}.", " ".join(lines), _advice(registry, engine, near, verdicts)
    ) from next((cause for cause in causes if cause), None)


def _unknown(registry: Registry, role: Role, engine: str) -> list[str]:
    other = [item for item in registry.backends() if item.descriptor.engine == engine]
    if other:
        return [f"{engine} is registered as a {other[0].descriptor.role} only."]
    known = sorted({item.descriptor.engine for item in registry.backends() if item.descriptor.role == role})
    return [f"Registered {role} engines: {', '.join(known) or 'none'}."]


def _near(registry: Registry, engine: str) -> tuple[str, ...]:
    return near_names(engine, {*registry.engines(), *PUBLISHED})


def _advice(registry: Registry, engine: str, near: Sequence[str], verdicts: Sequence[Verdict]) -> str:
    hints = [
        item.backend.descriptor.install_hint for item in verdicts if item.backend.descriptor.install_hint
    ]
    if hints:
        return f"Run {hints[0]}, or state the version of an odd build with {assume_variable(engine)}."
    if verdicts:
        return f"Install a version that fits, or state that of an odd build with {assume_variable(engine)}."
    if near and near[0] in registry.engines():
        return f"Write {near[0]}."
    command = install_command(engine) or (install_command(near[0]) if near else "")
    return f"Run {command}." if command else "Install a distribution that registers a backend for it."


def raise_tie(engine: str, winners: Sequence[Verdict]) -> NoReturn:
    """Raises the error of several backends that fit equally well, naming their distributions."""
    names = " and ".join(
        f"{item.backend.origin} (priority {item.backend.descriptor.priority})" for item in winners
    )
    distributions = list(dict.fromkeys(item.backend.distribution for item in winners))
    first = distributions[0]
    fix = (
        f'Pin one, such as plugin="{first}" or WEIGHTLANE_PIN_{engine_key(engine)}={first}.'
        if len(distributions) > 1
        else f"Report to the authors of {first} that two of its eras overlap."
    )
    raise SelectionError(f"{len(winners)} backends fit {engine} equally well.", f"They are {names}.", fix)


def _lines(verdicts: Sequence[Verdict]) -> str:
    return " ".join(f"{item.backend.origin}: {item.reason}." for item in verdicts if item.reason)
