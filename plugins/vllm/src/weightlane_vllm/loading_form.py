"""The form in which vLLM loaded a module that it has changed since: its own record, made before the load.

Seen: CPU builds pack linear weights away and leave empty parameters; 0.27.1 puts parameters without a
`weight_loader` in the place of a fused expert layer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


def loading_form_of(module: nn.Module) -> Mapping[str, Tensor] | None:
    """Copies of the recorded tensors, on the meta device; None where the module is as it was loaded.

    The caller keeps the copies. What the record leaves out (biases, expert maps) is as it is now.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    info = LAYERWISE_INFO.get(module)
    if info is None:
        return None
    recorded: dict[str, Tensor] = {}
    for tensors in info.restore_metadata:
        recorded.update(tensors)
    live = {**module._parameters, **module._buffers}
    if all(_as_loaded(recorded[name], live.get(name)) for name in recorded):
        return None
    return {name: restore_layer_refs(_copy_of(tensor), module) for name, tensor in recorded.items()}


def _as_loaded(recorded: Tensor, live: Tensor | None) -> bool:
    if live is None or type(live) is not type(recorded):
        return False
    same = (live.shape, live.stride(), live.dtype) == (recorded.shape, recorded.stride(), recorded.dtype)
    return same and recorded.__dict__.keys() <= live.__dict__.keys()


def _copy_of(recorded: Tensor) -> Tensor:
    import torch
    from torch import nn

    made: Tensor = torch.empty_strided(recorded.shape, recorded.stride(), dtype=recorded.dtype, device="meta")
    if isinstance(recorded, nn.Parameter):
        made = nn.Parameter(made, requires_grad=False)
    made.__class__ = recorded.__class__
    made.__dict__.update(recorded.__dict__)
    return made
