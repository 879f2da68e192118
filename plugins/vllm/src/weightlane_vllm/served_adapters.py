"""Which adapters a request may name: asked of the workers that hold them, before each generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError, near_names
from weightlane.failures import Failure, error_of, failure_of
from weightlane.messages import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence


Removals: TypeAlias = Literal["at-once", "when-released"]
"""What becomes of an adapter whose next version is served: with `when-released` requests may still run with
it, so that workers keep it until they are told that none does."""


class AskAdapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask-adapters"):
    """The question, after which `removals` holds and the adapters of these names are released."""

    removals: Removals
    release: tuple[str, ...] = ()


class ServedAdapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="served-adapters"):
    """What one worker serves, what it has loaded to serve next, and what it keeps until that is released."""

    adapters: tuple[AdapterRef, ...]
    loaded: tuple[AdapterRef, ...] = ()
    kept: tuple[AdapterRef, ...] = ()


_Answer: TypeAlias = ServedAdapters | Failure


def tell_served(worker: Any, request: bytes) -> bytes:
    """One worker's answer, encoded. What the engine has dropped is loaded again first.

    Args:
        worker: vLLM's own worker object.
        request: `AskAdapters`, encoded; empty where nothing is to change.
    """
    try:
        from weightlane_vllm.adapter_shelf import shelf_of

        shelf = shelf_of(worker)
        if request:
            asked: AskAdapters = decode(request, AskAdapters, sender="the front")
            shelf.removals = asked.removals
            shelf.release(asked.release)
        return encode(shelf.told())
    except Exception as error:  # noqa: BLE001 - the front must hear of it, whatever it is
        return encode(failure_of(error, origin=f"worker {worker.rank}"))


def agreed(answers: Sequence[bytes]) -> ServedAdapters:
    """What all workers tell alike.

    Raises:
        EngineError: a worker failed, or they serve different adapters.
    """
    told: list[ServedAdapters] = []
    for data in answers:
        answer: _Answer = decode(data, _Answer, sender="a worker")
        if isinstance(answer, Failure):
            raise error_of(answer)
        told.append(answer)
    served = [{ref.name: ref for ref in answer.adapters} for answer in told]
    if any(other != served[0] for other in served[1:]):
        each = "; ".join(f"worker {number} {_named(refs)}" for number, refs in enumerate(served))
        raise EngineError(
            "vLLM's workers serve different adapters.",
            f"They are: {each}.",
            "Sync the adapter again; a sync that was published in part leaves them so.",
        )
    return told[0]


def chosen_adapter(answers: Sequence[bytes], name: str) -> AdapterRef | None:
    """The adapter that a request named `name` is answered with, None for the base ("" where none is served).

    Raises:
        EngineError: a worker failed, workers differ, no adapter of this name is served, or none is named
            while some are. The base never answers in an adapter's place.
    """
    mine = {ref.name: ref for ref in agreed(answers).adapters}
    if name and name not in mine:
        near = near_names(name, mine)
        raise EngineError(
            f"vLLM serves no adapter {name!r}.",
            f"It serves {_named(mine)}.",
            f"Ask the lane for adapter_ref(); near: {', '.join(near)}." if near else "Sync one first.",
        )
    if mine and not name:
        raise EngineError(
            "A request to vLLM names no adapter.",
            f"It serves {_named(mine)}, and the base is not what was trained.",
            "Name what the lane's adapter_ref() tells.",
        )
    return mine[name] if name else None


def _named(refs: dict[str, AdapterRef]) -> str:
    return ", ".join(refs) or "the base alone"
