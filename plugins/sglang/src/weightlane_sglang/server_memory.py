"""The memory that a handle has had one server let go of, checked before each request about it.

SGLang does not tell what is released, answers a second release as the first, and dies of a resume of what is
not released. So tags are kept here with the incarnation that released them; where our loader sits in the
server, the scheduler's own tags are asked for as well, which finds what another controller did.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from weightlane.errors import EngineError, NotServableError
from weightlane_sglang.contract import RELEASE_ROUTE, RESUME_ROUTE, TAGS_FIELD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane.program import EngineCall

MEMORY_ROUTES = (RELEASE_ROUTE, RESUME_ROUTE)


class ServerMemory:
    """What this handle has released.

    Args:
        address: for errors.
        incarnation: asks the server for the identity that changes when it is started anew.
        told: asks our loader what the scheduler has released; None where it cannot be asked.
    """

    def __init__(
        self, address: str, incarnation: Callable[[], str], told: Callable[[], frozenset[str] | None]
    ) -> None:
        self._address = address
        self._incarnation = incarnation
        self._told = told
        self._released: dict[str, str] = {}
        self._held_back_in = ""  # the incarnation that was asked for a release

    @contextmanager
    def checked(self, call: EngineCall) -> Iterator[None]:
        """Around one request that releases or resumes; nothing is sent where it would do harm.

        A release that fails may have been obeyed, and is kept as if it was.

        Raises:
            EngineError: a tag is released already, or is not released in the server as it is now.
        """
        tags = _tags(call)
        now, told = self._incarnation(), self._told()
        for tag in tags:
            if call.route == RELEASE_ROUTE:
                self._require_held(tag, now, told)
            else:
                self._require_released(tag, now, told)
        if call.route == RELEASE_ROUTE:
            self._released.update(dict.fromkeys(tags, now))
            self._held_back_in = now
        yield
        if call.route == RESUME_ROUTE:
            for tag in tags:
                self._released.pop(tag, None)

    def goes_on(self) -> None:
        """Generation goes on: what was released is back, and written where it was lost."""
        self._held_back_in = ""

    def require_awake(self) -> None:
        """A request would wait for as long as generation is held back around a release.

        Raises:
            NotServableError: this handle released memory of this very server, and has not had it go on.
        """
        if self._held_back_in and self._held_back_in == self._incarnation():
            raise NotServableError(
                f"SGLang at {self._address} generates nothing now.",
                "This lane has had it release memory; generation is held back until all of that is back and "
                "holds weights.",
                "Sync, or wake it where it keeps its weights.",
            )

    def _require_held(self, tag: str, now: str, told: frozenset[str] | None) -> None:
        if (told is None and self._released.get(tag) != now) or (told is not None and tag not in told):
            return
        raise EngineError(
            f"{tag} cannot be released at {self._address}: it is released already.",
            "Only what was released is resumed, once; SGLang would answer a second release as the first.",
            "Let one side alone, the lane or its user, put this server to sleep; resume it, then connect.",
        )

    def _require_released(self, tag: str, now: str, told: frozenset[str] | None) -> None:
        before = self._released.get(tag)
        if before is not None and before != now:
            del self._released[tag]
            raise EngineError(
                f"{tag} cannot be resumed at {self._address}: the server was started anew since.",
                "The new server has released nothing, and SGLang ends itself on a resume of that.",
                "Sync: a server that was started anew is planned and written anew.",
            )
        if before is None or (told is not None and tag not in told):
            by = "its scheduler" if before is not None else "this lane"
            self._released.pop(tag, None)
            raise EngineError(
                f"{tag} cannot be resumed at {self._address}: {by} has not released it.",
                "SGLang ends itself on a resume of what is not released.",
                "Let one side alone, the lane or its user, wake this server.",
            )


def _tags(call: EngineCall) -> tuple[str, ...]:
    fields = msgspec.json.decode(call.body, type=dict[str, msgspec.Raw])
    return msgspec.json.decode(fields[TAGS_FIELD], type=tuple[str, ...])
