"""Runs inside an engine's worker: hashes of what it holds, so that two engines can be compared bit by bit."""

from __future__ import annotations

from typing import Any


def told(tensor: Any) -> str:
    """Dtype, shape and xxh3 of the bytes, on whatever device they are."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return f"{tensor.dtype!s} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(flat.numpy().tobytes())}"


def live_hashes_of(model: Any) -> dict[str, str]:
    """Of every parameter and buffer that has elements, under every name that it has."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: told(tensor) for name, tensor in named if tensor.numel()}


def device_memory() -> dict[str, int]:
    """Bytes that this process's torch holds on its current GPU; nothing where it has none."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
