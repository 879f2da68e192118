"""In an environment that has SGLang: reads requests as that version's server does, and tells what it read.

A program: `read_requests.py FILE`. The file is JSON, `{"requests": [[class, body], …], "adapter": {…}}`; what
is printed last is JSON too. No server is started: the classes, the unpickler and `LoRAConfig` are the
version's own, and nothing of weightlane is imported.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pydantic
import torch

PAYLOADS = ("serialized_named_tensors", "serialized_tensors")


def read(structs: Any, unpickle: Any, name: str, body: str) -> dict[str, Any]:
    kind = getattr(structs, name)
    listed = getattr(kind, "__struct_fields__", None) or tuple(kind.__dataclass_fields__)
    sent = json.loads(body)
    request = pydantic.TypeAdapter(kind).validate_python(sent)  # what FastAPI does with a body
    values = {field: getattr(request, field) for field in sent if field in listed and field not in PAYLOADS}
    payloads: list[Any] = []
    for field in PAYLOADS:
        if field in sent and field in listed:
            held = getattr(request, field)
            payloads += held if isinstance(held, list) else [held]
    return {
        "request": name,
        "unlisted": sorted(set(sent) - set(listed)),
        "values": values,
        "ranks": [tensors(unpickle(payload)) for payload in payloads],
    }


def tensors(found: Any) -> dict[str, Any]:
    """What `held` tells of each, and the container: an update reads pairs, LoRA a mapping."""
    pairs = found.items() if isinstance(found, dict) else found
    return {"container": type(found).__name__, "tensors": {name: held(tensor) for name, tensor in pairs}}


def held(tensor: torch.Tensor) -> list[Any]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [
        type(tensor).__name__,
        list(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        hashlib.sha256(raw).hexdigest(),
    ]


def accepted(wire: dict[str, Any]) -> dict[str, Any] | None:
    """What `LoRAConfig` makes of a configuration; None before 0.5.8, where it takes a folder alone."""
    kind = importlib.import_module("sglang.srt.lora.lora_config").LoRAConfig
    if not hasattr(kind, "from_dict"):
        return None
    config = kind.from_dict(wire)
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "targets": sorted(config.target_modules),
    }


def stand_in_for_what_torch_lost() -> None:
    """SGLang before 0.5.4 asks at its import, by a name that torch 2.13 has no more, what this CPU can do."""
    cpu = torch._C._cpu
    if not hasattr(cpu, "_is_amx_tile_supported"):
        cpu._is_amx_tile_supported = lambda: False


def main() -> None:
    stand_in_for_what_torch_lost()
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    structs = importlib.import_module("sglang.srt.managers.io_struct")
    unpickle = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer.deserialize
    told = {
        "version": importlib.import_module("sglang").__version__,
        "requests": [read(structs, unpickle, name, body) for name, body in asked["requests"]],
        "adapter": accepted(asked["adapter"]),
    }
    sys.stdout.write(f"\n{json.dumps(told)}\n")


if __name__ == "__main__":
    main()
