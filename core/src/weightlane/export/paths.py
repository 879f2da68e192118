"""Paths in a module tree without the wrappers that training puts there.

A wrapper is known by its class and never by the name of its child: a model may have a module of its own that
is called `module` or `_orig_mod`, and that one is part of its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlane.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Torch's wrapper classes, and the child under which each holds what it wraps."""


def inner_of(module: Any) -> tuple[str, Any] | None:
    """The segment and the module inside a wrapper of torch's; None for any other module."""
    for cls in type(module).__mro__:
        segment = _WRAPPERS.get(cls.__name__)
        if segment is not None and _package(cls) == "torch":
            inner = module._modules.get(segment)
            return None if inner is None else (segment, inner)
    return None


def unwrapped(module: Any) -> Any:
    """The module inside all wrappers around it."""
    while (inner := inner_of(module)) is not None:
        module = inner[1]
    return module


def own_class(module: Any) -> type:
    """The class that the module was made of; FSDP 2 puts a class of its own in front of it."""
    for cls in type(module).__mro__:
        if not any(base.__name__ == "FSDPModule" and _package(base) == "torch" for base in cls.__mro__):
            return cls
    return type(module)


def is_a(module: Any, name: str, package: str) -> bool:
    """Whether the module is of a class of this name from this package, which is not imported for it."""
    return any(cls.__name__ == name and _package(cls) == package for cls in type(module).__mro__)


def walk(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every module with its cleaned path, wrappers left out, in the order of the tree, shared ones again."""
    module = unwrapped(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{path}.{name}" if path else name)


def cleaned(model: Any, key: str) -> str:
    """The path of a parameter or buffer without wrappers' segments.

    Takes names of `named_parameters`, which have every segment, and of `state_dict`, which some wrappers
    have taken theirs out of already.
    """
    kept: list[str] = []
    module = model
    for part in key.split("."):
        while module is not None and (inner := inner_of(module)) is not None:
            segment, module = inner
            if part == segment:
                break
        else:
            kept.append(part)
            module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def cleaned_keys(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Each key and its cleaned form.

    Raises:
        ExportError: two keys become one, so that one tensor would take another's place.
    """
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for key in keys:
        clean = cleaned(model, key)
        if clean in first:
            raise ExportError(
                f"{first[clean]} and {key} are both {clean} without the names of wrappers.",
                "One of them would take the other's place.",
                "Rename one of the two modules.",
            )
        first[clean] = key
        found[key] = clean
    return found


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]
