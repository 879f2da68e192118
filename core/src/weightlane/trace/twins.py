"""Data-less twins in the place of a model's parameters and buffers, and the very same objects back.

A twin has the class, attributes, shape and strides of the tensor that it stands for, and lies on the meta
device. The model is left as it was found, also after an exception: the same tensors, at the same addresses,
in the same dictionaries.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(slots=True)
class Twin:
    """`tensor` stands for `live` (None where the engine has it no more), first met at `place`."""

    tensor: Tensor
    live: Tensor | None
    place: str


@dataclass(slots=True)
class Twins:
    """The twins of one model by `id` of the live tensor, and those that stand for none."""

    of: dict[int, Twin] = field(default_factory=dict)

    def add(self, live: Tensor, place: str) -> Tensor:
        """The twin of a live tensor; the same one for the same tensor, which keeps ties."""
        twin = self.of.get(id(live))
        if twin is None:
            twin = self.of[id(live)] = Twin(_twin_of(live), live, place)
        return twin.tensor

    def replace(self, made: Tensor, live: Tensor | None, place: str) -> Tensor:
        """`made`, in the form in which the engine loads it, for `live`; the first of a tied pair stands."""
        key = id(made) if live is None or not live.numel() else id(live)
        return self.of.setdefault(key, Twin(made, live, place)).tensor


@dataclass(frozen=True, slots=True)
class _Saved:
    module: nn.Module
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    attributes: dict[str, Any]
    non_persistent: set[str]


@contextmanager
def twins_in_place(
    model: nn.Module, loading_form: Callable[[nn.Module], Mapping[str, Tensor] | None]
) -> Iterator[Twins]:
    """Swaps every parameter and buffer of `model` for a twin.

    Args:
        model: any module tree; attributes that hold parameters, alone or in a list or dict, are swapped too.
        loading_form: the tensors of one module as the engine loads them, on the meta device and by their name
            in it, where the live ones have been changed since (packed, transposed); else None.
    """
    twins = Twins()
    saved: list[_Saved] = []
    try:
        for prefix, module in model.named_modules():
            saved.append(_save(module))
            _swap(module, f"{prefix}." if prefix else "", twins, loading_form(module) or {})
        yield twins
    finally:
        for record in saved:
            _restore(record)


def _save(module: nn.Module) -> _Saved:
    return _Saved(
        module,
        dict(module._parameters),
        dict(module._buffers),
        dict(module.__dict__),
        set(module._non_persistent_buffers_set),
    )


def _swap(module: nn.Module, prefix: str, twins: Twins, made: Mapping[str, Tensor]) -> None:
    held: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    for name, tensor in made.items():
        place: dict[str, Any] = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        place[name] = twins.replace(tensor, held.get(name), prefix + name)
    both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for own in both:
        for name, held_here in list(own.items()):
            if held_here is not None and name not in made:
                own[name] = twins.add(held_here, prefix + name)
    for name, value in list(module.__dict__.items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            swapped = _swapped(value, prefix + name, twins)
            if swapped is not value:
                module.__dict__[name] = swapped


def _swapped(value: Any, place: str, twins: Twins) -> Any:
    """Parameters in plain attributes; a list or dict of them is replaced by one of twins."""
    if isinstance(value, nn.Parameter):
        return twins.add(value, place)
    if type(value) is dict and any(isinstance(item, nn.Parameter) for item in value.values()):
        return {key: _swapped(item, f"{place}[{key!r}]", twins) for key, item in value.items()}
    if type(value) in (list, tuple) and any(isinstance(item, nn.Parameter) for item in value):
        return type(value)(_swapped(item, f"{place}[{number}]", twins) for number, item in enumerate(value))
    return value


def _restore(record: _Saved) -> None:
    module = record.module
    # The dictionaries themselves are kept: others may hold them.
    module.__dict__.clear()
    module.__dict__.update(record.attributes)
    module._parameters.clear()
    module._parameters.update(record.parameters)
    module._buffers.clear()
    module._buffers.update(record.buffers)
    module._non_persistent_buffers_set.clear()
    module._non_persistent_buffers_set.update(record.non_persistent)


def _twin_of(live: Tensor) -> Tensor:
    twin: Tensor = torch.empty_strided(live.shape, live.stride(), dtype=live.dtype, device="meta")
    if isinstance(live, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=False)
    twin.__class__ = live.__class__
    twin.__dict__.update(live.__dict__)
    return twin
