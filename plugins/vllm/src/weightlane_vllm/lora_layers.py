"""The LoRA layers of a live worker: which part of which layer is a checkpoint's module, and what it holds.

Everything is asked of vLLM's own manager at each call: nothing is derived from names that it would have to
agree with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.peft import lora_name

if TYPE_CHECKING:
    from torch import Tensor

_STACKING = "orig_to_new_stacked"
_RENAMES_ALONE = ("get_rename_mapper", "get_unstacked_mapper")
"""How a model class's mapper is asked for its renames without stacking, newest first (0.29, 0.25)."""


@dataclass(frozen=True, slots=True)
class LoraSite:
    """One module's place: `piece` is its number among the slices of a fused layer, None for a whole layer."""

    layer: Any
    piece: int | None

    def held(self, index: int) -> tuple[Tensor, Tensor]:
        """What the layer has in slot `index`: (largest rank, in) and (out, largest rank) of this worker."""
        part = self.piece or 0
        return self.layer.lora_a_stacked[part][index, 0], self.layer.lora_b_stacked[part][index, 0]

    def shard(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a module's whole matrices that belong to this worker, cut by the layer itself."""
        if self.layer.tp_size == 1:
            return first, second
        if self.piece is None:
            return self.layer.slice_lora_a(first), self.layer.slice_lora_b(second)
        firsts: list[Tensor | None] = [None] * int(self.layer.n_slices)
        seconds = list(firsts)
        firsts[self.piece], seconds[self.piece] = first, second
        return self.layer.slice_lora_a(firsts)[self.piece], self.layer.slice_lora_b(seconds)[self.piece]


class LoraLayers:
    """The wrapped layers of one worker that was started with LoRA on."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.manager: Any = worker.model_runner.lora_manager
        self._inner: Any = self.manager._adapter_manager

    @property
    def config(self) -> Any:
        """vLLM's own LoRA configuration."""
        return self.manager.lora_config

    def sites(self) -> dict[str, LoraSite]:
        """Linear modules that LoRA can be on here, by the receiver's own name; pieces of fused ones apart.

        A fused layer whose slices are not its pieces is left out, and so is whatever is no linear layer.
        """
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        found: dict[str, LoraSite] = {}
        for path, layer in self._inner.modules.items():
            if not isinstance(layer, BaseLinearLayerWithLoRA):
                continue
            pieces = self._inner.packed_modules.get(path)
            if pieces is None and layer.n_slices == 1:
                found[path] = LoraSite(layer, None)
            elif pieces is not None and len(pieces) == layer.n_slices:
                found |= {piece: LoraSite(layer, number) for number, piece in enumerate(pieces)}
        return found

    def receiver_name(self, module: str) -> str:
        """A checkpoint's module by the receiver's name, as vLLM itself parses the names of its tensors."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        return str(parse_fine_tuned_lora_name(lora_name(module, "A"), self.renames())[0])

    def renames(self) -> Any:
        """The model class's mapper without stacking, None where it has none; see `renames_alone`."""
        return renames_alone(getattr(self._inner.model, "hf_to_vllm_mapper", None))

    def skipped_prefixes(self) -> list[str] | None:
        """Prefixes of modules that the model class leaves out of adapters."""
        prefixes = getattr(self._inner.model, "lora_skip_prefixes", None)
        return None if prefixes is None else list(prefixes)

    def index_of(self, number: int) -> int | None:
        """The place in the layers' stacks of the adapter with this number, None where it has none now."""
        places: list[int | None] = self._inner.lora_index_to_id
        return places.index(number) if number in places else None


def renames_alone(mapper: Any) -> Any:
    """A `WeightsMapper` that renames and stacks nothing; None where there is none.

    Raises:
        EngineError: it stacks and tells no renames alone; with stacking an adapter would be put together
            wrongly.
    """
    if mapper is None:
        return None
    for method in _RENAMES_ALONE:
        if hasattr(mapper, method):
            return getattr(mapper, method)()
    if not hasattr(mapper, _STACKING):
        return mapper  # before 0.25 it holds nothing but renames
    raise EngineError(
        f"{type(mapper).__name__} of this vLLM has {_STACKING} and none of {', '.join(_RENAMES_ALONE)}.",
        "Names of adapter tensors go through its renames, and must not go through its stacking.",
        "Use a version of vLLM that this plugin was tested with.",
    )
