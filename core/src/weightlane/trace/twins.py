"""Twins in the place of a model's parameters and buffers, and the very same objects back.

A twin has the class, attributes, shape and strides of the tensor that it stands for, in a memory of its own;
for a trace it has no data and lies on the meta device. The model is left as it was found, also after an
exception: the same tensors, at the same addresses, in the same dictionaries, with the same entries.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weightlane.trace.containers import Contents, Kind, copied, note_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MOST_VALUES = 1 << 16


@dataclass(slots=True)
class Twin:
    """`tensor` stands for `live` (None where the engine has it no more), first met at `place`.

    `model` is the tensor whose form it has: `live`, or what the plugin made in the form of the checkpoint.
    """

    tensor: Tensor
    live: Tensor | None
    place: str
    model: Tensor


@dataclass(slots=True)
class Twins:
    """The twins of one model by `id` of what each stands for, and those that stand for nothing live."""

    likeness: Callable[[Tensor], Tensor]
    of: dict[int, Twin] = field(default_factory=dict)

    def add(self, live: Tensor, place: str) -> Tensor:
        """The twin of a live tensor; the same one for the same tensor, which keeps ties."""
        twin = self.of.get(id(live))
        if twin is None:
            twin = self.of[id(live)] = Twin(self._twin_of(live), live, place, live)
        return twin.tensor

    def replace(self, made: Tensor, live: Tensor | None, place: str) -> Tensor:
        """That of `made`, in the form in which the engine loads `live`; the first of a tied pair stands."""
        key = id(made) if live is None or not live.numel() else id(live)
        twin = self.of.get(key)
        if twin is None:
            twin = self.of[key] = Twin(self._twin_of(made), live, place, made)
        return twin.tensor

    def _twin_of(self, model: Tensor) -> Tensor:
        twin = self.likeness(model)
        if isinstance(model, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=False)
        try:
            twin.__class__ = model.__class__
        except TypeError:  # a class with slots: its instances are laid out otherwise
            twin = torch.Tensor._make_subclass(model.__class__, twin.detach())
            for name in _slots(model.__class__):
                if hasattr(model, name):
                    setattr(twin, name, copied(getattr(model, name)))
        twin.__dict__.update({name: copied(value) for name, value in model.__dict__.items()})
        return twin


@contextmanager
def twins_in_place(
    model: nn.Module,
    loading_form: Callable[[nn.Module], Mapping[str, Tensor] | None],
    likeness: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Twins]:
    """Swaps every parameter and buffer of `model` for a twin.

    Args:
        model: any module tree; attributes that hold parameters, alone or in a list or dict, are swapped too.
        loading_form: the tensors of one module as the engine loads them, on the meta device and by their name
            in it, where the live ones have been changed since (packed, transposed); else None.
        likeness: makes a tensor of the shape, strides and dtype of another; `without_data` if None.
    """
    twins = Twins(likeness or without_data)
    saved: list[Contents | Kind] = []
    noted: set[int] = set()
    try:
        for prefix, module in model.named_modules():
            saved += note_contents(module, noted)
            _swap(module, f"{prefix}." if prefix else "", twins, loading_form(module) or {})
        yield twins
    finally:
        for record in reversed(saved):  # a module's containers before the module that holds them
            record.put_back()


def without_data(model: Tensor) -> Tensor:
    """On the meta device, but for small buffers of integers.

    Loaders look into those for the engine's own layout (which experts are here), so they keep their values.
    """
    return _like(model, "cpu" if model.is_meta else model.device, torch.device("meta"))


def with_data(model: Tensor) -> Tensor:
    """With memory of its own, on the device of the model, or on the CPU where that has no data."""
    device = torch.device("cpu") if model.is_meta else model.device
    return _like(model, device, device)


def _like(model: Tensor, values: torch.device | str, other: torch.device) -> Tensor:
    integers = not (model.is_floating_point() or model.is_complex() or isinstance(model, nn.Parameter))
    has_values = integers and not model.is_meta and model.numel() <= _MOST_VALUES
    device = values if has_values else other
    made = torch.empty_strided(model.shape, model.stride(), dtype=model.dtype, device=device)
    if has_values:
        made.copy_(model)
    return made


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


def _slots(kind: type) -> list[str]:
    declared = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]
