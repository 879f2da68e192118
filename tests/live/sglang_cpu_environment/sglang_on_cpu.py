"""Lets an SGLang server import and run on a machine without a GPU, for our tests only.

Nothing here is part of weightlane or runs in its processes. `nox_engines.py` copies this file into the
site-packages of the SGLang environment beside a `.pth` line `import sglang_on_cpu`, so that every
process of the server has it. With native attention and native LoRA the server never calls the CUDA
kernels; it only imports them. Three things stand in the way of that:

* `sgl_kernel` has no CPU build: any of its modules is importable and any name in it is a placeholder
  that raises when it is called.
* the registry's torchvision is a CUDA build, whose library does not load beside a CPU torch, while
  its Python part registers shape functions for operators of that library: they are declared here.
* the LoRA code asks for pinned host memory, which a CPU torch cannot give: the request is dropped.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KERNELS = "sgl_kernel"
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")

# Keeps the declared operators alive: they go when their library object does.
_libraries: list[Any] = []


class Placeholder:
    """A kernel that can be imported, passed on and used as a decorator, but not run."""

    def __init__(self, path: str) -> None:
        self.__name__ = path

    def __getattr__(self, name: str) -> Placeholder:
        return _placeholder(self.__name__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        raise NotImplementedError(f"{self.__name__} is a CUDA kernel and was called on a CPU machine")


class PlaceholderModule(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Placeholder:
        return _placeholder(self.__name__, name)


def _placeholder(owner: str, name: str) -> Placeholder:
    # Python and torch ask objects for special names to learn what they are; those must stay absent.
    if name.startswith("__"):
        raise AttributeError(name)
    return Placeholder(f"{owner}.{name}")


def declare_vision_operators() -> None:
    """Declare the operators that torchvision's Python part refers to, unless its library will."""
    if "+cpu" in importlib.metadata.version("torchvision"):
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def drop_pinning() -> None:
    """Make torch's factories accept and ignore `pin_memory`."""
    import torch

    if torch.cuda.is_available():
        return

    def unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return call

    for name in FACTORIES:
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Supplies the kernel modules, and acts just before the two other imports that need help."""

    def __init__(self) -> None:
        self.pending = {"torchvision": declare_vision_operators, "sglang.srt.lora": drop_pinning}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self.pending.pop(fullname, None)
        if action is not None:
            action()
        if fullname.partition(".")[0] == KERNELS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.insert(0, Finder())
