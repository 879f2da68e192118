"""How a worker's weights are loaded: in place, or through the engine's layerwise reload. By evidence.

In place is first choice: parameters keep their memory, which captured graphs hold on to, and every element
can be read back. It needs parameters that are still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from weightlane.probes import NotViable, ProbeResult, require_attributes
from weightlane_vllm.facts import LAYERWISE_RELOAD

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from weightlane.facts import EngineFacts
    from weightlane.receiver import LiveTensor

PathName: TypeAlias = Literal["in-place", "layerwise-reload"]


@dataclass(frozen=True, slots=True)
class LoadPath:
    """The path and why."""

    name: PathName
    evidence: tuple[str, ...]


def probe_layerwise_reload(facts: EngineFacts) -> ProbeResult:
    """Whether the engine can put its layers back in their loading form, load them and pack them again."""
    return require_attributes(facts, (LAYERWISE_RELOAD,))


def choose_path(
    facts: EngineFacts, live: Sequence[LiveTensor], recorded: Collection[str]
) -> LoadPath | NotViable:
    """The path for a model as it stands, or why there is none.

    Args:
        facts: of the worker.
        live: its tensors; those without an element were packed away.
        recorded: names of those whose loading form the engine has on record.
    """
    emptied = emptied_names(live)
    if not emptied:
        return LoadPath("in-place", (f"all of {len(live)} live tensors hold their elements",))
    packed = f"the engine packed {len(emptied)} parameters away after loading and left them empty"
    verdict = probe_layerwise_reload(facts)
    if isinstance(verdict, NotViable):
        return NotViable(f"{packed}, and cannot load them again: {verdict.reason}")
    unknown = [name for name in emptied if name not in recorded]
    if unknown:
        return NotViable(f"{packed}, and has no record of how it loaded {', '.join(unknown[:3])}")
    return LoadPath("layerwise-reload", (packed, *verdict.evidence))


def emptied_names(live: Sequence[LiveTensor]) -> list[str]:
    """Tensors that the engine has left without an element."""
    return [tensor.name for tensor in live if 0 in tensor.shape]


def recorded_names(model: nn.Module) -> frozenset[str]:
    """Tensors whose loading form the engine has recorded with elements; none where it keeps no record."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    except ImportError:
        return frozenset()
    found: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        info = LAYERWISE_INFO.get(module)
        for tensors in info.restore_metadata if info is not None else ():
            found.update(f"{path}.{name}" if path else name for name, item in tensors.items() if item.numel())
    return frozenset(found)
