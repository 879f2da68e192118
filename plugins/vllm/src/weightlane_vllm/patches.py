"""Changes to vLLM itself, gated by a probe, idempotent, undoable; but for `adapter_supply`, all are here.

`plain_cpu_weights` is for CPU builds alone. Those pack every linear weight for oneDNN after loading and leave
an empty parameter behind (`vllm/model_executor/layers/utils.py`, `dispatch_cpu_unquantized_gemm`), so that
the engine's own `load_weights` has nothing to write to. With the switch off, vLLM takes its fallback,
`torch.nn.functional.linear` over the plain parameter. It must be off before the model is loaded.

Upstream: https://github.com/vllm-project/vllm/pull/32133 (layerwise reload: restores, loads, packs again).
A sync of packed weights goes through that reload (`layerwise_reload`); what was packed cannot be read back,
which is why this patch is the rule and `WEIGHTLANE_VLLM_CPU_WEIGHTS=packed` the exception.
To be removed when vLLM keeps the parameter beside what it packed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weightlane.errors import UsageError
from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, ProbeResult, require_attributes
from weightlane_vllm.facts import CPU_PREPACK_SWITCH, ENGINE

if TYPE_CHECKING:
    from types import ModuleType

_SWITCH = "_supports_onednn"

CPU_WEIGHTS = "WEIGHTLANE_VLLM_CPU_WEIGHTS"
"""Environment variable of the engine's process: `plain` (the default) or `packed`."""


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


def wants_packed() -> bool:
    """Whether the user asked for weights to stay packed.

    Raises:
        UsageError: the environment variable has another value than the two it knows.
    """
    wanted = os.environ.get(CPU_WEIGHTS, "plain")
    if wanted not in ("plain", "packed"):
        raise UsageError(f"{CPU_WEIGHTS}={wanted!r} is unknown.", "It is plain or packed.")
    return wanted == "packed"


def apply_where_viable() -> bool:
    """Applies `plain_cpu_weights` where its probe allows and the user wants it; whether it is in force."""
    if wants_packed() or isinstance(probe_plain_cpu_weights(platform_facts()), NotViable):
        return False
    plain_cpu_weights().apply()
    return True
