"""The requests that an engine has not ended: which adapter each names, and when each ran.

An adapter that is removed while a request names it ends the engine core: the next step loads what requests
name, finds nothing and raises (vLLM 0.27.1 and 0.32.0); an `LLM` without a core of its own tries it again and
never ends. So a request that names an adapter of ours which no
worker holds is refused where it is registered, before the engine core hears of it, as vLLM refuses an invalid
one. This takes the place of one method of one object and goes once vLLM itself refuses unknown adapters.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane_vllm.lora_request import is_ours

if TYPE_CHECKING:
    from collections.abc import Collection

_ATTRIBUTE = "_weightlane_running_requests"


@dataclass(frozen=True, slots=True)
class Ran:
    """When a request ran: how often generation had been resumed at its first and at its last output.

    `version` is what was published at the last.
    """

    first: int
    last: int
    version: int | None

    @property
    def in_one_go(self) -> bool:
        """Whether no pause lay between, so that one version made all of it."""
        return self.first == self.last


class RunningRequests:
    """One for each `AsyncLLM` or `LLM`, for as long as that lives.

    Used in one thread alone: that of an `AsyncLLM`'s event loop, or the one that calls an `LLM` just now.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self.paused = False
        self.resumes = 0
        self.published: int | None = None
        self.served_before: set[str] = set()
        """Names under which the prefix cache may hold what an adapter made, be it served still or not."""
        self._admitted: frozenset[str] | None = None

    def naming(self, names: Collection[str]) -> list[str]:
        """The engine's numbers of the requests that name one of these adapters of ours."""
        return [number for number, name in self._adapters() if name in names]

    def naming_none_of(self, names: Collection[str]) -> list[str]:
        """Those that name another adapter of ours than these."""
        return [number for number, name in self._adapters() if name not in names]

    def unended(self) -> int:
        """How many there are, in the engine core or on their way from it."""
        return len(self._processor().request_states)

    def half_done(self) -> list[str]:
        """Those that have tokens and have not ended, be they scheduled or preempted."""
        return [
            number for number, state in self._processor().request_states.items() if not state.is_prefilling
        ]

    def admit_only(self, names: Collection[str]) -> None:
        """From now on a request that names an adapter of ours names one of these, or is refused."""
        self._admitted = frozenset(names)
        self._guard()

    def _adapters(self) -> list[tuple[str, str]]:
        states = self._processor().request_states
        named = [(number, state.lora_request) for number, state in states.items()]
        return [(number, lora.lora_name) for number, lora in named if is_ours(lora)]

    def _processor(self) -> Any:
        engine = self._engine()
        if engine is None:
            raise AssertionError("whoever asks holds the engine")
        return getattr(engine, "llm_engine", engine).output_processor

    def _guard(self) -> None:
        """Idempotent: an object is guarded once."""
        processor = self._processor()
        if "add_request" in vars(processor):
            return
        honest = type(processor).add_request
        whose, mine = weakref.ref(processor), weakref.ref(self)

        def add_request(
            request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
        ) -> None:
            guard, target = mine(), whose()
            if guard is not None:
                guard._require_admitted(request.lora_request)
            honest(target, request, prompt, parent_req, request_index, queue)

        processor.add_request = add_request

    def _require_admitted(self, lora: Any) -> None:
        if self._admitted is None or not is_ours(lora) or lora.lora_name in self._admitted:
            return
        from vllm.exceptions import VLLMValidationError

        held = ", ".join(sorted(self._admitted)) or "none"
        raise VLLMValidationError(
            f"Adapter {lora.lora_name} is not served any more. Served: {held}. Name what the lane's "
            "adapter_ref() tells; ask it again after each sync."
        )


def running_requests_of(engine: Any) -> RunningRequests:
    """The one of an `AsyncLLM` or `LLM`; it lives on the engine itself, since lanes come and go."""
    requests: RunningRequests | None = vars(engine).get(_ATTRIBUTE)
    if requests is None:
        requests = RunningRequests(engine)
        setattr(engine, _ATTRIBUTE, requests)
    return requests


def unguard(engine: Any) -> None:
    """Takes the guard off again."""
    vars(engine.output_processor).pop("add_request", None)
