"""The eras of vLLM that this plugin knows: in each, a loader under LoRA takes one style of names.

Both are received by the same agent in the workers. What tells them apart is whether the LoRA wrapper itself
loads the layer that it wraps: then it takes plain names, else `.base_layer` names alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.probes import NotViable, ProbeResult, Viable, require_attributes
from weightlane.types import BackendDescriptor, Capability, TransportName
from weightlane_vllm.facts import DISTRIBUTIONS, ENGINE, LORA_LOAD_WEIGHTS, WORKER_EXTENSION

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts

BACKEND = "vllm"


def probe_lora_load_weights(facts: EngineFacts) -> ProbeResult:
    """`_HAS_LORA_LOAD_WEIGHTS`, and a worker that takes an extension class.

    Where the LoRA wrapper loads its own base layer, plain checkpoint names are right with LoRA on and off;
    the `.base_layer` names of older engines are refused by these and the other way round.
    """
    return require_attributes(facts, (LORA_LOAD_WEIGHTS, WORKER_EXTENSION))


def probe_base_layer_names(facts: EngineFacts) -> ProbeResult:
    """The opposite of `_HAS_LORA_LOAD_WEIGHTS`, looked for and not found; and an extension class."""
    extension = require_attributes(facts, (WORKER_EXTENSION,))
    if isinstance(extension, NotViable):
        return extension
    if LORA_LOAD_WEIGHTS not in facts.attributes:
        return NotViable(f"nobody looked for {LORA_LOAD_WEIGHTS} in this engine (facts from {facts.source})")
    if facts.attributes[LORA_LOAD_WEIGHTS]:
        return NotViable(f"the engine defines {LORA_LOAD_WEIGHTS}, so its loaders take plain names")
    absent = f"{LORA_LOAD_WEIGHTS} is absent: wrapped modules are loaded under .base_layer names"
    return Viable((*extension.evidence, absent))


def reference_here() -> str:
    """Names, to this engine's workers, the backend of the era that this process's own vLLM is of.

    A plain backend name stands for both eras. Imports vLLM.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    newer, older = ERAS
    era = newer if "load_weights" in BaseLayerWithLoRA.__dict__ else older
    return f"{_DISTRIBUTION}/{BACKEND}@{era.era}"


_DISTRIBUTION = "weightlane-vllm"
_CAPABILITIES = frozenset(
    {
        Capability.RECEIVE_FULL,
        Capability.RECEIVE_MERGED,
        Capability.RECEIVE_BASE,
        Capability.RECEIVE_ADAPTER,
        Capability.WORKER_AGENT,
    }
)
_TRANSPORTS = (
    TransportName.INPROCESS,
    TransportName.CUDA_IPC,
    TransportName.SHM,
    TransportName.INLINE,
    TransportName.DISK,
)
_INSTALL_HINT = "pip install 'weightlane-vllm[vllm]'"

ERAS = (
    BackendDescriptor(
        name=BACKEND,
        role="rollout",
        engine=ENGINE,
        era="lora-load-weights",
        versions=SpecifierSet(">=0.28,<0.33"),
        distributions=DISTRIBUTIONS,
        probe=probe_lora_load_weights,
        capabilities=_CAPABILITIES | {Capability.WEIGHT_VERSION},
        transports=_TRANSPORTS,
        summary="vLLM through an agent in its workers; plain checkpoint names.",
        install_hint=_INSTALL_HINT,
        contracts="weightlane_vllm",
    ),
    BackendDescriptor(
        name=BACKEND,
        role="rollout",
        engine=ENGINE,
        era="base-layer-names",
        versions=SpecifierSet(">=0.23,<0.28"),  # 0.23.0 and 0.27.1 were run, older ones never
        distributions=DISTRIBUTIONS,
        probe=probe_base_layer_names,
        capabilities=_CAPABILITIES,
        transports=_TRANSPORTS,
        summary="vLLM through an agent in its workers; .base_layer names where LoRA wraps a module.",
        install_hint=_INSTALL_HINT,
        contracts="weightlane_vllm",
    ),
)
