"""A change to vLLM: one worker's LoRA manager gets adapters from memory instead of from a folder.

vLLM takes an adapter from nowhere but a folder: `WorkerLoRAManager._load_adapter` reads it whenever a request
names one that is not loaded. Here that method of one manager object asks us by number first. So the engine's
own `add_lora` loads what we hold, and an adapter that was dropped is back with the next request that names
it: a weight update through vLLM's own transfer drops all since 0.28, another adapter that needs the slot
drops one in every version.

Upstream: https://github.com/vllm-project/vllm/issues/4068 (asked for; pull request 12609 was closed).
To be removed when vLLM takes an adapter as tensors.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from weightlane.probes import NotViable, ProbeResult, Viable

if TYPE_CHECKING:
    from collections.abc import Callable

_METHOD = "_load_adapter"


def probe_adapter_supply(manager: object) -> ProbeResult:
    """Whether the manager's class loads every adapter by one method that takes the request alone."""
    method = getattr(type(manager), _METHOD, None)
    owner = f"{type(manager).__name__}.{_METHOD}"
    if method is None:
        return NotViable(f"{owner} is absent: adapters are loaded some other way")
    parameters = list(inspect.signature(method).parameters)
    if parameters != ["self", "lora_request"]:
        return NotViable(f"{owner} takes {', '.join(parameters)} instead of self, lora_request")
    return Viable((f"{owner}(self, lora_request) loads every adapter",))


class AdapterSupply:
    """The adapters that one manager gets from memory, by number.

    Args:
        manager: vLLM's `WorkerLoRAManager` of a live worker.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._makers: dict[int, Callable[[], Any]] = {}
        self._previous: Callable[[Any], Any] | None = None

    @property
    def active(self) -> bool:
        """Whether the manager asks us."""
        return self._previous is not None

    def apply(self) -> None:
        """From now on the manager asks here first. A second call changes nothing."""
        if self._previous is None:
            self._previous = getattr(self._manager, _METHOD)
            setattr(self._manager, _METHOD, self._load)

    def undo(self) -> None:
        """Puts back what `apply` found. A second call changes nothing."""
        if self._previous is not None:
            setattr(self._manager, _METHOD, self._previous)
            self._previous = None

    def offer(self, number: int, make: Callable[[], Any]) -> None:
        """Gives `make()` whenever this number is loaded: a new `LoRAModel` each time, vLLM's to change."""
        self._makers[number] = make

    def withdraw(self, number: int) -> None:
        """No longer gives it. An unknown number is fine."""
        self._makers.pop(number, None)

    def _load(self, lora_request: Any) -> Any:
        make = self._makers.get(lora_request.lora_int_id)
        if make is not None:
            return make()
        if self._previous is None:
            raise AssertionError("a manager that was put back does not call this")
        return self._previous(lora_request)
