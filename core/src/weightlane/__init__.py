"""weightlane moves a trainer's weights into rollout engines, and proves that they arrived.

::

    import weightlane as wl

    lane = wl.connect(trainer=wl.trainer("torch", model=model), rollout=[wl.rollout("reference", url=url)])
    print(lane.plan())
    lane.sync(version=step)

Importing this module loads neither torch nor any plugin; names are fetched on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightlane import errors as errors
    from weightlane.lane import Lane as Lane
    from weightlane.lane import Mode as Mode
    from weightlane.lane import connect as connect
    from weightlane.lane import rollout as rollout
    from weightlane.lane import trainer as trainer
    from weightlane.lock_writing import write_lock as write_lock

__version__ = "0.1.0"

_LAZY = {
    "Lane": "weightlane.lane",
    "Mode": "weightlane.lane",
    "connect": "weightlane.lane",
    "rollout": "weightlane.lane",
    "trainer": "weightlane.lane",
    "write_lock": "weightlane.lock_writing",
    "errors": "",
}
"""Public names and the modules that define them; "" for a submodule of that name."""

__all__ = ["Lane", "Mode", "__version__", "connect", "errors", "rollout", "trainer", "write_lock"]


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object
    if module:
        value = getattr(importlib.import_module(module), name)
    else:
        value = importlib.import_module(f"{__name__}.{name}")
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
