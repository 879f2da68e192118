"""Which adapters a request may name: asked of the workers that hold them, before each generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError, near_names
from weightlane.failures import Failure, error_of, failure_of
from weightlane.messages import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence


class ServedAdapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="served-adapters"):
    """What one worker serves."""

    adapters: tuple[AdapterRef, ...]


_Answer: TypeAlias = ServedAdapters | Failure


def tell_served(worker: Any) -> bytes:
    """One worker's answer, encoded. What the engine has dropped is loaded again first."""
    try:
        from weightlane_vllm.adapter_shelf import shelf_of

        return encode(ServedAdapters(shelf_of(worker).serving()))
    except Exception as error:  # noqa: BLE001 - the front must hear of it, whatever it is
        return encode(failure_of(error, origin=f"worker {worker.rank}"))


def chosen_adapter(answers: Sequence[bytes], name: str) -> AdapterRef | None:
    """The adapter that a request named `name` is answered with, None for the base ("" where none is served).

    Raises:
        EngineError: a worker failed, workers differ, no adapter of this name is served, or none is named
            while some are. The base never answers in an adapter's place.
    """
    served: list[dict[str, AdapterRef]] = []
    for data in answers:
        answer: _Answer = decode(data, _Answer, sender="a worker")
        if isinstance(answer, Failure):
            raise error_of(answer)
        served.append({ref.name: ref for ref in answer.adapters})
    if any(other != served[0] for other in served[1:]):
        told = "; ".join(f"worker {number} {_named(refs)}" for number, refs in enumerate(served))
        raise EngineError(
            "vLLM's workers serve different adapters.",
            f"They are: {told}.",
            "Sync the adapter again; a sync that was published in part leaves them so.",
        )
    mine = served[0]
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
