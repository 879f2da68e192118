"""Inside the server: what a scheduler's LoRA manager holds of one adapter, and whether its pool has the same.

Two steps. What the manager keeps on the host is compared with what was sent, by digests, part by part of its
fused matrices. Then this rank's place in the pool, which the kernels read, is compared with the slices that
SGLang's own layers cut from that, element by element. An adapter that is not in the pool yet is put there as
its first request would: a request for our loader comes while nothing generates.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from weightlane.base_digest import value_digest
from weightlane.errors import EngineError
from weightlane.peft import lora_name
from weightlane_sglang.adapter_targets import PACKED, fused_module
from weightlane_sglang.loader_messages import AdapterHeld, ReadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from weightlane_sglang.loader_messages import AskedModule

_TOLD_RANK = "tp_rank"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def held_adapter(model: nn.Module, request: ReadAdapter) -> AdapterHeld:
    """What this rank holds under the name that is asked for.

    Raises:
        EngineError: LoRA is off, or no adapter or several have that name.
    """
    manager = _manager_of(model)
    found = [ref for ref in manager.lora_refs.values() if ref.lora_name == request.name]
    if len(found) != 1:
        names = ", ".join(str(ref.lora_name) for ref in manager.lora_refs.values()) or "none"
        raise EngineError(
            f"SGLang's LoRA manager holds {len(found)} adapters called {request.name}.", f"It holds {names}."
        )
    uid = found[0].lora_id
    adapter, pool = manager.loras[uid], manager.memory_pool
    if uid not in pool.uid_to_buffer_id:
        manager.fetch_new_loras({uid})
    problems: list[str] = []
    bound: list[str] = []
    reader = _Reader(manager, adapter, int(pool.uid_to_buffer_id[uid]))
    for fused, parts in _by_fused(request.modules).items():
        wrong = reader.differences(fused, parts)
        problems += wrong
        if not wrong:
            bound += [part.module for part in parts]
    return AdapterHeld(
        rank=int(adapter.config.r),
        scaling=float(adapter.scaling),
        bound=tuple(bound),
        others=tuple(sorted(reader.unread)),
        problems=tuple(problems),
    )


def _manager_of(model: nn.Module) -> Any:
    """The manager of this model's LoRA, from whoever called our loader: what it is handed leads nowhere.

    The collector's own list would not do: SGLang freezes what it holds once it is warm, and off it goes.
    """
    frame = inspect.currentframe()
    while frame is not None:
        for runner in _runners_of(frame.f_locals.get("self")):
            manager = getattr(runner, "lora_manager", None)
            if manager is not None and getattr(manager, "base_model", None) is model:
                return manager
        frame = frame.f_back
    raise EngineError("This SGLang server has no LoRA manager.", "It runs without --enable-lora.")


def _runners_of(caller: Any) -> Iterator[Any]:
    """Model runners that an object leads to: itself, a TP worker's, and since 0.5.16 a weight updater's."""
    yield caller
    yield getattr(caller, "model_runner", None)
    given = getattr(caller, "get_model_runner", None)
    if callable(given):
        yield given()


def _by_fused(modules: Sequence[AskedModule]) -> dict[str, tuple[AskedModule, ...]]:
    """Asked modules by the engine's module that holds them, in the order of its rows."""
    grouped: dict[str, list[tuple[int, AskedModule]]] = {}
    for item in modules:
        fused, number = fused_module(item.module)
        grouped.setdefault(fused, []).append((number, item))
    return {
        fused: tuple(item for _, item in sorted(parts, key=lambda part: part[0]))
        for fused, parts in grouped.items()
    }


class _Reader:
    """Reads one adapter in one place of the pool; `unread` are the host's matrices that nobody asked for."""

    def __init__(self, manager: Any, adapter: Any, slot: int) -> None:
        self._manager = manager
        self._pool = manager.memory_pool
        self._rank = int(adapter.config.r)
        self._slot = slot
        self._held: dict[str, Tensor] = {
            name: tensor for layer in adapter.layers for name, tensor in layer.weights.items()
        }
        self.unread = {*self._held, *adapter.embedding_layers}

    def differences(self, fused: str, parts: Sequence[AskedModule]) -> list[str]:
        """How what is held for the parts of one module differs from what was sent; empty for not at all."""
        members = PACKED.get(fused.rpartition(".")[2], ("",))
        if len(parts) != len(members):
            return [f"{fused} has {len(members)} parts, and {len(parts)} were sent"]
        names = lora_name(fused, "A"), lora_name(fused, "B")
        if not set(names) <= self._held.keys():
            return [f"SGLang keeps nothing for {fused}"]
        self.unread -= set(names)
        a, b = (self._held[name] for name in names)
        return self._host(parts, a, b) or self._live(fused, a, b, len(members))

    def _host(self, parts: Sequence[AskedModule], a: Tensor, b: Tensor) -> list[str]:
        problems: list[str] = []
        row = 0
        for number, part in enumerate(parts):
            own_a = a[number * self._rank : (number + 1) * self._rank]
            own_b = b[row : row + part.rows]
            row += part.rows
            for side, own, sent in (("A", own_a, part.digest_a), ("B", own_b, part.digest_b)):
                if value_digest(own) != sent:
                    problems.append(f"SGLang keeps other values of lora_{side} of {part.module}")
        return problems

    def _live(self, fused: str, a: Tensor, b: Tensor, parts: int) -> list[str]:
        import torch

        found = _LAYER.search(fused)
        layer = int(found[1]) if found else -1
        modules: Mapping[str, Any] = self._manager.lora_modules[layer] if found else {}
        wrapper = modules.get(fused)
        if wrapper is None:
            return [f"SGLang has no layer with LoRA for {fused}"]
        leaf = fused.rpartition(".")[2]
        if leaf not in self._pool.A_buffer or leaf not in self._pool.B_buffer:
            return [f"SGLang's LoRA pool has no place for {leaf}"]
        pool_a, pool_b = self._pool.A_buffer[leaf][layer], self._pool.B_buffer[leaf][layer]
        problems: list[str] = []
        if not wrapper.set_lora or not _reads(wrapper, "A_buffer", pool_a, "B_buffer", pool_b):
            problems.append(f"SGLang's layer {fused} does not read its LoRA pool")
        pairs = (
            ("A", self._sliced(wrapper.slice_lora_a_weights, a), pool_a[self._slot, : self._rank * parts]),
            ("B", self._sliced(wrapper.slice_lora_b_weights, b), pool_b[self._slot, :, : self._rank]),
        )
        for side, wanted, live in pairs:
            if not torch.equal(wanted.to(device=live.device, dtype=live.dtype), live):
                problems.append(f"SGLang's pool holds other values of lora_{side} of {fused}")
        return problems

    def _sliced(self, slice_weights: Callable[..., Tensor], matrix: Tensor) -> Tensor:
        """This rank's part, cut by SGLang's layer: before 0.5.17 its pool tells it the rank."""
        if _TOLD_RANK in inspect.signature(slice_weights).parameters:
            return slice_weights(matrix, int(self._pool.tp_rank))
        return slice_weights(matrix)


def _reads(layer: Any, name_a: str, pool_a: Tensor, name_b: str, pool_b: Tensor) -> bool:
    """Whether a layer's own buffers are these; fused layers have a word behind the name (`A_buffer_qkv`)."""
    return all(
        any(name.startswith(prefix) and _is_same(held, pool) for name, held in vars(layer).items())
        for prefix, pool in ((name_a, pool_a), (name_b, pool_b))
    )


def _is_same(some: Any, other: Tensor) -> bool:
    return some is not None and some.data_ptr() == other.data_ptr() and some.shape == other.shape
