"""Adapters under their names in an OpenAI server: what a request gives as its `model`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane_vllm.lora_request import lora_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import AdapterRef


class ServedNames:
    """The names that lanes have put into a server's table of models; those of its users stay as they are.

    A name is there while the workers hold its adapter, whole: vLLM's engine core dies of a request for one
    that it cannot load.
    """

    def __init__(self) -> None:
        self._tables: list[Any] = []
        self._shown: dict[str, Any] = {}
        # Bounded by what is done under it: a few writes to dictionaries.
        self._lock = threading.Lock()

    def add_table(self, serving_models: Any) -> None:
        """vLLM's `OpenAIServingModels`; it gets what is served now."""
        with self._lock:
            self._tables.append(serving_models)
            serving_models.lora_requests.update(self._shown)

    def show(self, adapters: Sequence[AdapterRef]) -> None:
        """These can be named from now on, and no other of ours.

        Raises:
            EngineError: one has the name of an adapter that a user of the server has loaded.
        """
        with self._lock:
            requests = {ref.name: lora_request(ref) for ref in adapters}
            for table in self._tables:
                taken = requests.keys() & (table.lora_requests.keys() - self._shown.keys())
                if taken:
                    raise EngineError(
                        f"The OpenAI server has a model named {min(taken)!r}, as an adapter is to be.",
                        "A request could not tell which of them it means.",
                        "Give the adapter another name, or unload that model.",
                    )
            for table in self._tables:
                table.lora_requests.update(requests)  # first: a name that stays is never away
                for name in self._shown.keys() - requests.keys():
                    table.lora_requests.pop(name, None)
            self._shown = requests

    def withdraw(self) -> None:
        """None of ours can be named: their adapters, or the weights under them, are about to be written."""
        self.show(())
