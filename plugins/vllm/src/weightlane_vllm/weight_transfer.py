"""Our backend in vLLM's own weight transfer: `LLM(weight_transfer_config={"backend": "weightlane"})`.

vLLM's factory is process-wide and forgets nothing, so every process of an engine registers once: through the
`vllm.general_plugins` entry point, or by `register()` before an engine of this process is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.probes import NotViable, ProbeResult
from weightlane_vllm.transfer_eras import era_of, facts_of, no_facts
from weightlane_vllm.transfer_layout import BACKEND

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts

_OURS = "_weightlane_registered"


def register() -> ProbeResult:
    """Adds the backend to this process's factory where vLLM has one that fits. A second call changes nothing.

    Imports vLLM's factory and no other engine code.

    Raises:
        EngineError: somebody else has registered a backend of this name.
    """
    found = era_of(transfer_facts())
    if isinstance(found, NotViable):
        return found
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    era, verdict = found
    factory: Any = WeightTransferEngineFactory
    if not getattr(factory, _OURS, False):
        try:
            factory.register_engine(BACKEND, era.engine_class())
        except ValueError as error:
            raise EngineError(
                f"vLLM's weight transfer already has a backend {BACKEND} that is not ours.",
                f"{error}",
                "Remove the plugin that registers it.",
            ) from error
        setattr(factory, _OURS, True)
    return verdict


def transfer_facts() -> EngineFacts:
    """What the probes need to know of this process's vLLM."""
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return no_facts()
    return facts_of(WeightTransferEngineFactory, WeightTransferEngine)
