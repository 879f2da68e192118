"""Adapters of an `AsyncLLM` come and go while requests run: none goes before those that name it have ended.

Workers keep an adapter whose next version is served until they are told that no request runs with it. Its
requests go on; new ones are refused where they are registered (`running_requests`). What still runs at the
next sync is waited for or aborted, as the lane's policy says, before anything is loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weightlane.errors import EngineError
from weightlane.messages import encode
from weightlane_vllm.engine_calls import ADAPTERS_METHOD
from weightlane_vllm.served_adapters import AskAdapters, ServedAdapters, agreed

if TYPE_CHECKING:
    from collections.abc import Collection

    from weightlane.adapters import AdapterRef
    from weightlane_vllm.async_llm_calls import AsyncLlmCalls

_POLL_SECONDS = 0.05


class AdapterTurnover:
    """What a front does about adapters around a sync.

    Args:
        calls: on the engine, which runs with LoRA.
        seconds: bound on the first question.
    """

    def __init__(self, calls: AsyncLlmCalls, seconds: float) -> None:
        self._calls = calls
        self._publishes: tuple[AdapterRef, ...] = ()
        self._kept: frozenset[str] = frozenset()
        self._learn(self._ask(seconds), seconds)

    def release_idle(self, seconds: float) -> None:
        """Lets go of what was kept and no request names any more; waits for nothing."""
        if self._kept:
            busy = self._busy(seconds)
            idle = [name for name in self._kept if name not in busy]
            if idle:
                self._learn(self._ask(seconds, release=idle), seconds)

    def drain(self, seconds: float) -> None:
        """Waits until no request names what was kept.

        Raises:
            EngineError: some still do after `seconds`.
        """
        self._learn(self._ask(seconds), seconds)
        self._await_none(self._kept, seconds, "of the version before the last")
        self.release_idle(seconds)

    def abort(self, seconds: float) -> None:
        """Ends the requests that name what was kept."""
        self._learn(self._ask(seconds), seconds)
        kept = self._kept
        self._calls.abort(lambda requests: requests.naming(kept), seconds)
        self.release_idle(seconds)

    def before_publish(self, seconds: float) -> None:
        """A version that is published again takes the place of one of its own name: that is waited for.

        Raises:
            EngineError: requests still named it after `seconds`.
        """
        self._publishes = self._ask(seconds).loaded
        self._await_none(self._new_names, seconds, "published again")

    def after_publish(self, seconds: float) -> None:
        """Refuses what is not served any more, lets go of what nobody needs, and of stale prefixes.

        The prefix cache tells adapters apart by name and path, or by name alone before (0.27.1); with the
        version in both, only a name that was served before can meet what another adapter left there.
        """
        told = self._ask(seconds)
        self._learn(told, seconds)
        again = self._calls.with_requests("served before", lambda it: set(it.served_before), seconds)
        names = self._new_names
        self._calls.with_requests("published", lambda it: it.served_before.update(names), seconds)
        if again & names and not self._calls.reset_prefix_cache_of_running(seconds):
            raise EngineError(
                "vLLM did not reset its prefix cache.",
                f"{', '.join(sorted(again & names))} was served before with other values.",
                "Sync again, or publish under a version that was never used.",
            )
        self.release_idle(seconds)

    @property
    def publishes_beside(self) -> bool:
        """Whether what is published now has a name of its own, beside those that serve."""
        return bool(self._new_names)

    def before_resume(self, seconds: float) -> int:
        """Ends requests that waited through a sync and name an adapter that this dropped; tells how many."""
        told = self._ask(seconds)
        self._learn(told, seconds)
        held = {ref.name for ref in (*told.adapters, *told.kept)}
        return self._calls.abort(lambda requests: requests.naming_none_of(held), seconds)

    @property
    def _new_names(self) -> set[str]:
        """Under swap `two_slot`, where each version has its own; under `paused` the name never changes."""
        return {ref.name for ref in self._publishes if ref.name.endswith(f"@{ref.version}")}

    def _ask(self, seconds: float, release: Collection[str] = ()) -> ServedAdapters:
        question = encode(AskAdapters("when-released", tuple(release)))
        return agreed(self._calls.collective_rpc("adapters", ADAPTERS_METHOD, (question,), seconds))

    def _learn(self, told: ServedAdapters, seconds: float) -> None:
        self._kept = frozenset(ref.name for ref in told.kept)
        self._calls.admit_adapters([ref.name for ref in told.adapters], seconds)

    def _busy(self, seconds: float) -> set[str]:
        kept = self._kept
        return self._calls.with_requests(
            "requests", lambda requests: {name for name in kept if requests.naming((name,))}, seconds
        )

    def _await_none(self, names: Collection[str], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while names:
            count = self._calls.with_requests("requests", lambda it: len(it.naming(names)), seconds)
            if not count:
                return
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{count} request{'s' if count > 1 else ''} still named {', '.join(sorted(names))} after "
                    f"{seconds:g} s.",
                    f"The adapter is {what}, and without it the engine core would end.",
                    "Await them before the sync, allow more time, or connect with requests='abort'.",
                )
            time.sleep(_POLL_SECONDS)
