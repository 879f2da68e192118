"""Our backend in vLLM's own weight transfer: `LLM(weight_transfer_config={"backend": "weightlane"})`.

vLLM's factory is process-wide and forgets nothing, so every process of an engine registers once: through the
`vllm.general_plugins` entry point, or by `register()` before an engine of this process is made.
"""

from __future__ import annotations

from typing import Any

from weightlane.errors import EngineError
from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, ProbeResult, require_attributes
from weightlane_vllm.facts import ENGINE, TRANSFER_FACTORY, TRANSFER_SESSION
from weightlane_vllm.transfer_layout import BACKEND

_OURS = "_weightlane_registered"


def probe_weight_transfer(facts: EngineFacts) -> ProbeResult:
    """A factory that takes backends of others, which then have the whole session (0.25 and newer)."""
    return require_attributes(facts, (TRANSFER_FACTORY, TRANSFER_SESSION))


def register() -> ProbeResult:
    """Adds the backend to this process's factory where vLLM has one that fits. A second call changes nothing.

    Imports vLLM's factory and no other engine code.

    Raises:
        EngineError: somebody else has registered a backend of this name.
    """
    verdict = probe_weight_transfer(transfer_facts())
    if isinstance(verdict, NotViable):
        return verdict
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from weightlane_vllm.transfer_engine import engine_class

    factory: Any = WeightTransferEngineFactory
    if not getattr(factory, _OURS, False):
        try:
            factory.register_engine(BACKEND, engine_class())
        except ValueError as error:
            raise EngineError(
                f"vLLM's weight transfer already has a backend {BACKEND} that is not ours.",
                f"{error}",
                "Remove the plugin that registers it.",
            ) from error
        setattr(factory, _OURS, True)
    return verdict


def transfer_facts() -> EngineFacts:
    """What the probe needs to know of this process's vLLM."""
    answers = {TRANSFER_FACTORY: False, TRANSFER_SESSION: False}
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return EngineFacts(ENGINE, "", "worker", attributes=answers)
    answers[TRANSFER_FACTORY] = "register_engine" in vars(WeightTransferEngineFactory)
    answers[TRANSFER_SESSION] = "start_weight_update" in vars(WeightTransferEngine)
    return EngineFacts(ENGINE, "", "worker", attributes=answers)
