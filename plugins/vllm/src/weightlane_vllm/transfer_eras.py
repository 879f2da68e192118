"""The eras of vLLM's weight transfer, told by its own classes: what a backend is made with and asked for.

Before 0.22 a backend was made without the model and the configuration took vLLM's own names alone
(https://github.com/vllm-project/vllm/blob/v0.21.0/vllm/config/weight_transfer.py).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, ProbeResult, Viable, require_attributes
from weightlane_vllm.facts import (
    ENGINE,
    TRANSFER_CONFIG,
    TRANSFER_FACTORY,
    TRANSFER_LOADER,
    TRANSFER_MODEL,
    TRANSFER_SESSION,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class TransferEra:
    """One way in which vLLM makes a backend and calls it.

    Attributes:
        name: in reasons.
        probe: whether an engine is of this era.
        engine_class: makes our class for it; imports vLLM's base class.
    """

    name: str
    probe: Callable[[EngineFacts], ProbeResult]
    engine_class: Callable[[], type[Any]]


def probe_sessions(facts: EngineFacts) -> ProbeResult:
    """A backend is made with configuration and model, and has the whole session (0.25 and newer)."""
    return require_attributes(facts, (TRANSFER_FACTORY, TRANSFER_SESSION, TRANSFER_CONFIG, TRANSFER_MODEL))


def probe_chunks(facts: EngineFacts) -> ProbeResult:
    """A backend is made with the model, and has chunks and a loader alone (0.22 to 0.24)."""
    verdict = require_attributes(facts, (TRANSFER_FACTORY, TRANSFER_MODEL, TRANSFER_LOADER))
    if isinstance(verdict, Viable) and facts.attributes.get(TRANSFER_SESSION):
        return NotViable(f"the engine defines {TRANSFER_SESSION}, so a backend has more than chunks")
    return verdict


def _session_class() -> type[Any]:
    from weightlane_vllm.transfer_session import engine_class

    return engine_class()


def _chunk_class() -> type[Any]:
    from weightlane_vllm.transfer_chunks import engine_class

    return engine_class()


ERAS = (
    TransferEra("sessions", probe_sessions, _session_class),
    TransferEra("chunks", probe_chunks, _chunk_class),
)


def era_of(facts: EngineFacts) -> tuple[TransferEra, Viable] | NotViable:
    """The era and the evidence for it, or why none fits."""
    reasons = []
    for era in ERAS:
        verdict = era.probe(facts)
        if isinstance(verdict, Viable):
            return era, verdict
        reasons.append(f"{era.name}: {verdict.reason}")
    return NotViable("; ".join(reasons))


def facts_of(factory: type[Any], base: type[Any]) -> EngineFacts:
    """What the probes need to know of vLLM's factory and of its base class for backends."""
    made_with = _parameters(base, "__init__")
    return EngineFacts(
        ENGINE,
        "",
        "worker",
        attributes={
            TRANSFER_FACTORY: "register_engine" in vars(factory),
            TRANSFER_SESSION: {"start_weight_update", "finish_weight_update"} <= set(vars(base)),
            TRANSFER_CONFIG: "vllm_config" in made_with,
            TRANSFER_MODEL: "model" in made_with,
            TRANSFER_LOADER: "load_weights" in _parameters(base, "receive_weights"),
        },
    )


def no_facts() -> EngineFacts:
    """Those of a vLLM without weight transfer (before 0.16)."""
    absent = (TRANSFER_FACTORY, TRANSFER_SESSION, TRANSFER_CONFIG, TRANSFER_MODEL, TRANSFER_LOADER)
    return EngineFacts(ENGINE, "", "worker", attributes=dict.fromkeys(absent, False))


def _parameters(owner: type[Any], name: str) -> set[str]:
    own = vars(owner).get(name)
    return set(inspect.signature(own).parameters) if callable(own) else set()
