"""A copy of a model's module tree without wrappers and without weights, for code that reads structure.

transformers' own conversion walks modules, asks for their classes and for shapes of parameters. A live model
may be wrapped, sharded and full of peft's layers; the copy is what it was made as.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.export.paths import own_class, unwrapped
from weightlane.export.places import is_copy_holder, is_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def structure_of(model: Any, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Any:
    """The model's tree, its parameters on the meta device with the shapes that are given by name.

    Modules are shallow copies: what they refer to (configurations, say) is the live model's own.
    """
    return _copy(model, "", shapes)


def _copy(module: Any, path: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Any:
    import torch

    module = _bare(module)
    cls = own_class(module)
    copy: Any = object.__new__(cls)
    copy.__dict__.update(module.__dict__)
    below = f"{path}." if path else ""
    copy.__dict__["_parameters"] = {
        name: torch.nn.Parameter(
            torch.empty(shapes[below + name][0], dtype=shapes[below + name][1], device="meta"), False
        )
        for name in module._parameters
        if below + name in shapes
    }
    copy.__dict__["_buffers"] = {}
    copy.__dict__["_modules"] = {
        name: _copy(child, below + name, shapes)
        for name, child in module._modules.items()
        if child is not None
    }
    return copy


def _bare(module: Any) -> Any:
    while True:
        module = unwrapped(module)
        if is_layer(module):
            module = module._modules["base_layer"]
        elif is_copy_holder(module):
            module = module._modules.get("original_module") or module._modules["token_adapter"]
        else:
            return module
