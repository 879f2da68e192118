"""What peft's own objects say, and what its layers do, written down as JSON; the recorder of `data/peft`.

Run with the interpreter of an environment that holds one release: `python peft_releases.py > FILE`. Python's
own kinds are kept: a set, a tuple, an enumeration and an object are written with their kind, so that a test
can have them again without that release.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, make_dataclass
from enum import Enum
from typing import Any

MODULES = ("q_proj", "layers.0.q_proj", "layers.0.v_proj", "layers.1.q_proj", "layers.1.k.v_proj")
EVERY = ["q_proj", "v_proj"]

# Arguments of LoraConfig; a release that does not know one of them leaves the case out.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["v_proj", "q_proj"], "task_type": "CAUSAL_LM"},
    "all linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.(q|v)_proj"},
    "excluded": {"target_modules": EVERY, "exclude_modules": ["layers.1.q_proj", "k.v_proj"]},
    "excluded by regex": {"target_modules": EVERY, "exclude_modules": r"layers\.1\..*"},
    "layers": {"target_modules": EVERY, "layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
    "one layer": {"target_modules": EVERY, "layers_to_transform": 1},
    "stabilised": {"target_modules": EVERY, "use_rslora": True},
    "ranks": {"target_modules": EVERY, "rank_pattern": {"v_proj": 2, "layers.0.q_proj": 8}},
    "scales": {"target_modules": EVERY, "alpha_pattern": {"layers.1.q_proj": 32, "q_proj": 3}},
    "both": {
        "target_modules": EVERY,
        "rank_pattern": {"q_proj": 8},
        "alpha_pattern": {"layers.0.q_proj": 32, "v_proj": 1},
        "use_rslora": True,
    },
    "alternatives": {"target_modules": EVERY, "rank_pattern": {"layers.0.q_proj|layers.0.v_proj": 2}},
    "anchored": {"target_modules": EVERY, "rank_pattern": {r"^layers\.0\.q_proj": 2}},
    "whole name": {"target_modules": EVERY, "alpha_pattern": {"q_proj": 5.5}},
    "DoRA": {"target_modules": EVERY, "use_dora": True},
    "replicated": {"target_modules": EVERY, "layer_replication": [[0, 2], [1, 2]]},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["q_proj"]},
    "biases": {"target_modules": EVERY, "lora_bias": True},
    "tokens": {"target_modules": EVERY, "trainable_token_indices": [7, 8]},
    "parameters": {"target_modules": EVERY, "target_parameters": ["mlp.experts.down_proj"]},
    "loaded to a GPU": {"target_modules": EVERY, "runtime_config": {"ephemeral_gpu_offload": True}},
    "block-diagonal": {"target_modules": EVERY, "use_bdlora": "BdLoraConfig"},
    "EVA": {"target_modules": EVERY, "eva_config": "EvaConfig", "init_lora_weights": "eva"},
    "PiSSA": {"target_modules": EVERY, "init_lora_weights": "pissa"},
    "activated": {"target_modules": EVERY, "alora_invocation_tokens": [5]},
}

# Cases whose layers are made; the others need another model, or other packages.
LAYERED = (
    "plain",
    "regex",
    "stabilised",
    "ranks",
    "scales",
    "both",
    "alternatives",
    "anchored",
    "whole name",
)


def build(case: str) -> Any:
    """The configuration object of a case; None where the installed release does not know an argument."""
    import peft

    arguments = {"r": 4, "lora_alpha": 8, **CASES[case]}
    known = set(inspect.signature(peft.LoraConfig).parameters)
    if not set(arguments) <= known:
        return None
    for key, value in arguments.items():
        kind = getattr(peft, value, None) if isinstance(value, str) and value.endswith("Config") else None
        if kind is not None:
            arguments[key] = kind()
    if "runtime_config" in arguments:
        from peft.tuners.lora.config import LoraRuntimeConfig

        arguments["runtime_config"] = LoraRuntimeConfig(**arguments["runtime_config"])
    if "layer_replication" in arguments:
        arguments["layer_replication"] = [tuple(pair) for pair in arguments["layer_replication"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.LoraConfig(**arguments)


def layers_of(case: str) -> dict[str, tuple[int, float]]:
    """Rank and scale that the release's own layers have, by module."""
    import torch
    from peft import inject_adapter_in_model

    model = torch.nn.Module()
    for name in MODULES:
        parent = model
        *folders, leaf = name.split(".")
        for folder in folders:
            if folder not in parent._modules:
                parent.add_module(folder, torch.nn.Module())
            parent = parent._modules[folder]  # type: ignore[assignment]
        parent.add_module(leaf, torch.nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(build(case), model)
    return {
        name: (int(layer.r["default"]), float(layer.scaling["default"]))
        for name, layer in model.named_modules()
        if hasattr(layer, "scaling")
    }


def told_by_dict(config: Any) -> Any:
    """`to_dict` of an object, or what it raises."""
    try:
        return config.to_dict()
    except Exception as error:  # noqa: BLE001 - some releases fail on their own fields, in several ways
        return f"{type(error).__name__}: {error}"


def written(value: Any) -> Any:
    """A value as JSON, with its kind."""
    if isinstance(value, Enum):
        return {"enum": written(value.value)}
    if isinstance(value, set | frozenset):
        return {"set": sorted((written(item) for item in value), key=str)}
    if isinstance(value, tuple):
        return {"tuple": [written(item) for item in value]}
    if isinstance(value, list):
        return [written(item) for item in value]
    if isinstance(value, Mapping):
        return {"mapping": [[str(key), written(item)] for key, item in value.items()]}
    if is_dataclass(value):
        return {"object": [[field.name, written(getattr(value, field.name))] for field in fields(value)]}
    return (
        value
        if isinstance(value, bool | int | float | str) or value is None
        else {"other": type(value).__name__}
    )


def read_back(value: Any) -> Any:
    """The value again; an object is one with the same attributes."""
    if isinstance(value, list):
        return [read_back(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "enum":
        return Enum("Recorded", {"MEMBER": content}, type=str).MEMBER  # type: ignore[attr-defined]
    if kind == "set":
        return {read_back(item) for item in content}
    if kind == "tuple":
        return tuple(read_back(item) for item in content)
    if kind == "mapping":
        return {key: read_back(item) for key, item in content}
    if kind == "object":
        attributes = {key: read_back(item) for key, item in content}
        return make_dataclass("Recorded", list(attributes))(**attributes)
    if kind == "other":
        return f"<{content}>"
    return content


def record() -> dict[str, Any]:
    """Everything of the installed release; of each case what differs from the plain one."""
    import peft

    built = {case: config for case in CASES if (config := build(case)) is not None}
    objects = {
        case: {key: written(item) for key, item in vars(config).items()} for case, config in built.items()
    }
    dicts: dict[str, Any] = {}
    for case, config in built.items():
        told = told_by_dict(config)
        dicts[case] = told if isinstance(told, str) else {key: written(item) for key, item in told.items()}
    return {
        "release": peft.__version__,
        "objects": _differences(objects),
        "dicts": _differences(dicts),
        "layers": {case: layers_of(case) for case in LAYERED},
    }


def _differences(cases: dict[str, Any]) -> dict[str, Any]:
    plain = cases["plain"]
    return {
        case: told
        if case == "plain" or isinstance(told, str)
        else {key: item for key, item in told.items() if key not in plain or plain[key] != item}
        for case, told in cases.items()
    }


def recorded(record: dict[str, Any], kind: str, case: str) -> Any:
    """One case of a record, whole and with its kinds again; a string where the release failed."""
    told, plain = record[kind][case], record[kind]["plain"]
    if isinstance(told, str):
        return told
    return {key: read_back(item) for key, item in {**plain, **told}.items()}


if __name__ == "__main__":
    parts = record()
    lines = [f'"release": {json.dumps(parts.pop("release"))}']
    for kind, cases in parts.items():
        inside = ",\n".join(f" {json.dumps(case)}: {json.dumps(told)}" for case, told in cases.items())
        lines.append(f"{json.dumps(kind)}: {{\n{inside}\n}}")
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
