"""Runs inside a scheduler of SGLang, entered as `--custom-weight-loader` beside weightlane's own.

`answer` lies with the loaders of the live tests (`tests/live/sglang/in_server`), which the server must be
able to import as well.
"""

from __future__ import annotations

import json
from typing import Any

LOADER = "probed_scheduler.hashes"


def hashes(model: Any, named_tensors: Any) -> None:
    """Of every live tensor, and of the place in the LoRA pool of the adapter that the message names."""
    from live_loaders import answer

    answer(named_tensors, lambda message: _held(model, json.loads(message)["adapter"]))


def _held(model: Any, adapter: str | None) -> dict[str, Any]:
    from live_tensors import device_memory, live_hashes_of

    lora = _in_pool(model, adapter) if adapter else {}
    return {"live": live_hashes_of(model), "lora": lora, "memory": device_memory()}


def _in_pool(model: Any, adapter: str) -> dict[str, str]:
    """What the kernels read for it, all layers of each module; its rank must be that of the pool."""
    from live_tensors import told

    from weightlane_sglang.adapter_held import _manager_of

    manager = _manager_of(model)
    (uid,) = [ref.lora_id for ref in manager.lora_refs.values() if ref.lora_name == adapter]
    pool = manager.memory_pool
    place = pool.uid_to_buffer_id[uid]
    return {
        f"{kind} {module} {layer}": told(buffer[place])
        for kind in ("A_buffer", "B_buffer")
        for module, layers in getattr(pool, kind).items()
        for layer, buffer in enumerate(layers)
    }
