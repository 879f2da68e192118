"""Warnings about plugins, each shown once per process."""

from __future__ import annotations

import threading
import warnings

_shown: set[str] = set()
# Bounded by what its holders do: to look into a set.
_lock = threading.Lock()


class PluginWarning(UserWarning):
    """A plugin cannot be used, an observer failed, or a backend runs outside the versions it names."""


def warn_once(message: str, *, stacklevel: int = 2) -> None:
    """Warns, unless this process has shown the same text before; `stacklevel` counts from the caller."""
    with _lock:
        if message in _shown:
            return
        _shown.add(message)
    warnings.warn(message, PluginWarning, stacklevel=stacklevel + 1)
