"""What each tensor of a model is: part of the base, of an adapter, or of a copy that is trained beside it.

peft is recognised by the names of its classes and never imported. A tensor's path is followed through the
module tree; each layer of peft's that it passes through is told, innermost last, since peft puts one layer
around another where several parameters of one module are adapted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from weightlane.export.paths import is_a, own_class, unwrapped

if TYPE_CHECKING:
    from collections.abc import Mapping

Part = Literal["base", "adapter", "original", "copy"]
"""`original` is what `modules_to_save` keeps of the base, `copy` the copy that it trains."""

_TOKENS = "token_adapter"


@dataclass(frozen=True, slots=True)
class PeftLayer:
    """A layer of peft's: its path without wrappers, and the live module, read for facts only."""

    path: str
    module: Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor belongs.

    `name` is what the model without peft calls it. `layers` are the layers of peft's around it, outermost
    first. `adapter` is the adapter that the tensor belongs to, for the parts `adapter` and `copy`, and `leaf`
    what the tensor is within it (`lora_A.weight`). `holder` is the module of peft's that holds a tensor which
    is none of the base. `held` is the live parameter or buffer, told apart by identity only: it may be a
    shard.
    """

    name: str
    part: Part
    layers: tuple[PeftLayer, ...] = ()
    adapter: str = ""
    leaf: str = ""
    held: Any = None
    holder: PeftLayer | None = None


def is_layer(module: Any) -> bool:
    """Whether peft put this in the place of a layer."""
    return is_a(module, "BaseTunerLayer", "peft")


def is_copy_holder(module: Any) -> bool:
    """Whether peft trains a copy of a whole module, or rows of it, beside the original."""
    return is_a(module, "AuxiliaryTrainingWrapper", "peft") or is_a(module, "ModulesToSaveWrapper", "peft")


def active_adapters(module: Any) -> tuple[str, ...]:
    """Which adapters a layer, or a holder of a trained copy, computes with now."""
    found = module.active_adapter
    return (found,) if isinstance(found, str) else tuple(found)


def place_of(model: Any, key: str) -> Place:
    """Follows a cleaned key through the module tree."""
    return _Walk(model).follow(key.split("."))


def base_model_of(model: Any) -> Any:
    """The module that peft's own two wrappers are around; the model itself without them."""
    module = unwrapped(model)
    while (step := _peft_root_step(module)) is not None:
        module = unwrapped(module._modules[step])
    return module


def adapter_configs(model: Any) -> Mapping[str, Any]:
    """peft's configurations by adapter name; empty for a model without peft."""
    module = unwrapped(model)
    while True:
        found = getattr(module, "peft_config", None)
        if found:
            return dict(found)
        step = _peft_root_step(module)
        if step is None:
            return {}
        module = unwrapped(module._modules[step])


def _peft_root_step(module: Any) -> str | None:
    for name, child in (("PeftModel", "base_model"), ("BaseTuner", "model")):
        if is_a(module, name, "peft") and module._modules.get(child) is not None:
            return child
    return None


class _Walk:
    """One tensor's way down the tree."""

    def __init__(self, model: Any) -> None:
        self._module: Any = model
        self._names: list[str] = []
        self._path: list[str] = []
        self._layers: list[PeftLayer] = []
        self._part: Part = "base"
        self._beside_of: PeftLayer | None = None

    def follow(self, parts: list[str]) -> Place:
        for number, part in enumerate(parts[:-1]):
            module = self._module = None if self._module is None else unwrapped(self._module)
            if module is None:  # below a tensor that no module holds: a state dict's own affair
                self._names.append(part)
            elif is_copy_holder(module) and part == "modules_to_save":
                return self._copy(parts[number:])
            elif is_layer(module) and part != "base_layer":
                return self._of_adapter(parts[number:])
            else:
                self._step_into(part)
        self._names.append(parts[-1])
        return self._place()

    def _step_into(self, part: str) -> None:
        if is_layer(self._module):
            self._layers.append(PeftLayer(".".join(self._path), self._module))
        elif is_copy_holder(self._module):
            if part != _TOKENS:  # that one is a layer of its own, around the embedding
                self._part, self._beside_of = "original", self._holder()
        elif _peft_root_step(self._module) != part:
            self._names.append(part)
        self._descend(part)

    def _descend(self, part: str) -> None:
        self._path.append(part)
        self._module = self._module._modules.get(part)

    def _place(self) -> Place:
        held = None
        if self._module is not None:
            module, name = unwrapped(self._module), self._names[-1]
            held = module._parameters.get(name)
            held = module._buffers.get(name) if held is None else held
        name = ".".join(self._names)
        return Place(name, self._part, tuple(self._layers), held=held, holder=self._beside_of)

    def _of_adapter(self, rest: list[str]) -> Place:
        """`lora_A.NAME.weight` below a layer: an adapter's name is one segment, as peft itself demands."""
        holder, module = self._holder(), self._module
        for part in rest[:-1]:
            module = None if module is None else module._modules.get(part)
        return Place(
            ".".join(self._names),
            "adapter",
            tuple(self._layers),
            adapter=rest[1] if len(rest) > 1 else "",
            leaf=".".join([rest[0], *rest[2:]]),
            held=None if module is None else module._parameters.get(rest[-1]),
            holder=holder,
        )

    def _copy(self, rest: list[str]) -> Place:
        holder = self._holder()
        for part in rest[:2]:
            self._descend(part)
        below = _Walk(self._module).follow(rest[2:])
        name = ".".join([*self._names, below.name])
        return Place(name, "copy", tuple(self._layers), rest[1], held=below.held, holder=holder)

    def _holder(self) -> PeftLayer:
        return PeftLayer(".".join(self._path), self._module)


def class_name(module: Any) -> str:
    """What a module is, for messages: its own class with the package that it is from."""
    cls = own_class(module)
    return f"{cls.__module__.partition('.')[0]}'s {cls.__name__}"
