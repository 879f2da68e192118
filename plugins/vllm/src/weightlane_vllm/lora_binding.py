"""What a live worker applies in a LoRA slot, compared with what was sent: module by module, by its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import AdapterBinding, BoundModule
from weightlane.peft import lora_name

if TYPE_CHECKING:
    from torch import Tensor

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.peft import ModuleLora
    from weightlane_vllm.lora_layers import LoraLayers, LoraSite

_OFF = 1e-2  # of the largest element: beyond rounding in any dtype, below any real difference


def binding_of(layers: LoraLayers, load: AdapterLoad, number: int) -> AdapterBinding:
    """Which modules of the adapter the layers hold, each with the rank and the scale that they apply.

    A module that holds other values than were sent is not bound. One that holds them scaled otherwise is told
    with that scale: vLLM folds it into `lora_b`, so only the values tell how often. Modules that hold
    something and have no part in the adapter are told by the receiver's name.
    """
    index = layers.index_of(number)
    if index is None:
        return AdapterBinding(load.ref, ())
    rest = layers.sites()
    bound: list[BoundModule] = []
    for module in load.config.target_modules:
        site = rest.pop(layers.receiver_name(module), None)
        found = site and _bound(site, index, load, module)
        if found:
            bound.append(found)
    for name, site in rest.items():
        first, second = site.held(index)
        if first.any() or second.any():
            bound.append(BoundModule(name, int(first.any(1).sum()), 1.0))
    return AdapterBinding(load.ref, tuple(bound))


def _bound(site: LoraSite, index: int, load: AdapterLoad, module: str) -> BoundModule | None:
    held_a, held_b = site.held(index)
    first, second = load.tensors.get(lora_name(module, "A")), load.tensors.get(lora_name(module, "B"))
    if first is None or second is None:
        return None
    lora = load.config.lora_of(module)
    first, second = (sent.to(held_a.dtype) for sent in site.shard(first, second))
    if not _equal(held_a, first):
        return None
    scale = _scale(held_b, second, lora)
    return None if scale is None else BoundModule(module, int(first.shape[0]), scale)


def _scale(held: Tensor, sent: Tensor, lora: ModuleLora) -> float | None:
    """What `sent` was multiplied with to become what is held; None where that is no multiple of it."""
    if _equal(held, sent * lora.scaling):
        return lora.scaling
    inside = held[: sent.shape[0], : sent.shape[1]].double()
    wanted = sent.to(held.device).double()
    if inside.shape != wanted.shape or bool(held[:, sent.shape[1] :].any()) or not bool(wanted.any()):
        return None
    scale = float((inside * wanted).sum() / (wanted * wanted).sum())
    off = float((inside - scale * wanted).abs().max())
    return scale if scale and off <= _OFF * abs(scale) * float(wanted.abs().max()) else None


def _equal(held: Tensor, sent: Tensor) -> bool:
    """Whether `held` is `sent`, bit for bit, with zeros where it is larger."""
    import torch

    if any(large < small for large, small in zip(held.shape, sent.shape, strict=True)):
        return False
    whole = torch.zeros_like(held)
    whole[: sent.shape[0], : sent.shape[1]] = sent
    return torch.equal(held, whole)
