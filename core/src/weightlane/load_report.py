"""What is said after loading: plugins that cannot be used, and pins that pin nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.discovery import DISABLE_VARIABLE, STRICT_VARIABLE
from weightlane.errors import PluginError, near_names
from weightlane.notices import warn_once
from weightlane.pins import engine_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightlane.loading import Loaded
    from weightlane.pins import Pin


def require_usable(loaded: Iterable[Loaded]) -> None:
    """Strict mode.

    Raises:
        PluginError: plugins that are neither active nor disabled, all of them; the cause is the first one's.
    """
    bad = _unusable(loaded)
    if not bad:
        return
    lines = "; ".join(item.status.sentence for item in bad)
    raise PluginError(
        f"{len(bad)} plugin{'' if len(bad) == 1 else 's'} cannot be used: {lines}.",
        f"{STRICT_VARIABLE} asks for every installed plugin to work.",
        f"Mend or uninstall it, name it in {DISABLE_VARIABLE}, or unset {STRICT_VARIABLE}.",
    ) from bad[0].cause


def warn_of_unusable(loaded: Iterable[Loaded]) -> None:
    """One warning for each such plugin, in any other mode."""
    for item in _unusable(loaded):
        warn_once(f"Plugin {item.status.sentence}.", stacklevel=4)


def warn_of_stray_pins(pins: Mapping[str, Pin], engines: Sequence[str]) -> None:
    """One warning for each pin whose engine is likely misspelt."""
    known = [engine_key(engine) for engine in engines]
    for key, pin in pins.items():
        near = near_names(key, known)
        if key not in known and near:
            warn_once(f"{pin.origin} pins engine {key}, which no plugin registers; near: {', '.join(near)}.")


def _unusable(loaded: Iterable[Loaded]) -> list[Loaded]:
    return [item for item in loaded if item.status.state not in {"active", "disabled"}]
