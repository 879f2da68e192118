"""The answer that `explain` gives for one name."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["checkpoint", "receiver", "lora", "unknown"]
Verdict: TypeAlias = Literal["placed", "in-part", "dropped", "owned", "uncovered", "refused", "unknown"]

EVERY_WORKER = -1


class Route(msgspec.Struct, frozen=True):
    """Elements of a checkpoint tensor that become elements of one worker's tensor; ranges in words.

    `worker` is `EVERY_WORKER` where a snapshot tells of all of them together.
    """

    worker: int
    source: str
    taken: str
    target: str
    put: str
    casts: tuple[str, ...] = ()
    order: str = ""


class Explanation(msgspec.Struct, frozen=True):
    """The answer for one name.

    `says` are sentences for people, the last of them what to do where something is to be done. `rule` is
    what decided, `group` the names that must travel with it, `more_routes` how many are not listed.
    """

    name: str
    kind: Kind
    verdict: Verdict
    says: tuple[str, ...]
    rule: str = ""
    sent_as: str = ""
    routes: tuple[Route, ...] = ()
    more_routes: int = 0
    group: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
