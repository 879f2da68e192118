"""The live model beside its trace: what cannot be traced, and whether all stands as before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightlane.errors import EngineError
from weightlane.trace.table import Obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def untraceable(model: nn.Module) -> tuple[Obstacle, ...]:
    """What no twin can stand for; a model with any of it must not be touched."""
    found = [
        Obstacle("untraceable", "", (), (path or type(module).__name__,), "a scripted module")
        for path, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    ]
    for name, tensor in _tensors(model):
        what = ""
        held: Any = tensor  # torch's types do not know that a tensor may be such a wrapper
        if nn.parameter.is_lazy(tensor):
            what = "a parameter that has no shape yet"
        elif is_traceable_wrapper_subclass(held):
            what = f"a {type(tensor).__name__}, whose memory is that of tensors inside it"
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            what = f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}"
        if what:
            found.append(Obstacle("untraceable", "", (), (name,), what))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Standing:
    """A live tensor and where it lay; `memory` keeps that memory, `version` is torch's count of writes."""

    name: str
    tensor: Tensor
    memory: Tensor
    address: int
    version: int | None


class LiveModel:
    """The tensors of a model as they stand; made before a trace, asked after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._standing = [
            _Standing(name, tensor, tensor.detach(), _address(tensor), _version(tensor))
            for name, tensor in _tensors(model)
        ]

    def changes(self) -> tuple[Obstacle, ...]:
        """Obstacles for tensors that the loader reached past their twins; another memory is undone.

        Raises:
            EngineError: a name stands for another tensor than before, so the model is not what it was.
        """
        found: list[Obstacle] = []
        for item in self._standing:
            moved = _address(item.tensor) != item.address or _form(item.tensor) != _form(item.memory)
            if moved:
                item.tensor.data = item.memory
            if moved or _version(item.tensor) != item.version:
                what = f"{item.name} itself, which it holds elsewhere too"
                found.append(Obstacle("foreign", "", (), (item.name,), what))
        self._require_the_same()
        return tuple(found)

    def _require_the_same(self) -> None:
        now = dict(_tensors(self._model))
        other = [item.name for item in self._standing if now.get(item.name) is not item.tensor]
        if other or len(now) != len(self._standing):
            raise EngineError(
                f"The model is not what it was before its loader was traced ({', '.join(other[:3])}).",
                "A container of its modules did not take back what it held.",
                "Start the engine anew before it serves, and report the architecture.",
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under every name. Not asked of the model: it may filter."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    yield (f"{prefix}.{name}" if prefix else name), tensor


def _form(tensor: Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()


def _version(tensor: Tensor) -> int | None:
    """Torch's count of writes; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version
