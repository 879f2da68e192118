"""Warnings and log records about plugins, each given once per process."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("weightlane.selection")
_shown: set[str] = set()
_logged: set[str] = set()
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


def log_once(message: str) -> None:
    """Logs a decision to `weightlane.selection` at level INFO, unless this process has logged that text."""
    with _lock:
        if message in _logged:
            return
        _logged.add(message)
    _log.info("%s", message)


@contextmanager
def quiet_plugins() -> Iterator[None]:
    """Keeps warnings about plugins back, for a command whose own answer says what concerns it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        yield
