"""Changes to vLLM itself, gated by a probe, idempotent, undoable; but for `adapter_supply`, all are here.

`plain_cpu_weights` is for CPU builds alone. Those pack every linear weight for oneDNN after loading and leave
an empty parameter behind (`vllm/model_executor/layers/utils.py`, `dispatch_cpu_unquantized_gemm`), so that
the engine's own `load_weights` has nothing to write to. With the switch off, vLLM takes its fallback,
`torch.nn.functional.linear` over the plain parameter. It must be off before the model is loaded.

Upstream: https://github.com/vllm-project/vllm/pull/32133 (layerwise reload: restores, loads, packs again).
To be removed when this plugin loads through layerwise reload, or when vLLM keeps the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, ProbeResult, require_attributes
from weightlane_vllm.facts import CPU_PREPACK_SWITCH, ENGINE

if TYPE_CHECKING:
    from types import ModuleType

_SWITCH = "_supports_onednn"


def probe_plain_cpu_weights(facts: EngineFacts) -> ProbeResult:
    """Whether `plain_cpu_weights` applies: a CPU platform whose build has the switch."""
    if facts.device != "cpu":
        return NotViable(f"the platform is {facts.device or 'unknown'}; only CPU builds pack weights away")
    return require_attributes(facts, (CPU_PREPACK_SWITCH,))


class PlainCpuWeights:
    """The switch of one process; `active` while it is held off by us."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._previous: object = None
        self.active = False

    def apply(self) -> None:
        """Turns packing off. A second call changes nothing."""
        if not self.active:
            self._previous = getattr(self._module, _SWITCH)
            setattr(self._module, _SWITCH, False)
            self.active = True

    def undo(self) -> None:
        """Puts back what `apply` found; for models loaded from now on. A second call changes nothing."""
        if self.active:
            setattr(self._module, _SWITCH, self._previous)
            self.active = False


_here: PlainCpuWeights | None = None


def plain_cpu_weights() -> PlainCpuWeights:
    """The one patch object of this process. Imports vLLM's custom ops, hence torch."""
    global _here  # noqa: PLW0603 - one switch a process, like the attribute that it sets
    if _here is None:
        import vllm._custom_ops as custom_ops

        _here = PlainCpuWeights(custom_ops)
    return _here


def platform_facts() -> EngineFacts:
    """What the probe needs to know of this process: its platform, and whether the build has the switch."""
    import vllm._custom_ops as custom_ops
    from vllm.platforms import current_platform

    return EngineFacts(
        engine=ENGINE,
        version="",
        source="worker",
        attributes={CPU_PREPACK_SWITCH: _SWITCH in vars(custom_ops)},
        device=str(current_platform.device_type),
    )


def apply_where_viable() -> bool:
    """Applies `plain_cpu_weights` where its probe allows; says whether it is in force now."""
    if isinstance(probe_plain_cpu_weights(platform_facts()), NotViable):
        return False
    plain_cpu_weights().apply()
    return True
