"""All that the tables of a model depend on which is built here without data: what they are kept under."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weightlane.installations import find_distribution
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib import metadata

    from weightlane.contexts import TraceModelContext
    from weightlane.hook_calls import Selected

_CORE = "weightlane"
_MODEL_FILES = frozenset({".json", ".py"})
"""What an engine reads of a folder to build its model: configurations, and code that the folder brings."""
_METADATA = (".dist-info", ".egg-info")
_VARIABLES = ("CUDA_", "TORCH", "WEIGHTLANE_")


class BuiltFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables made from equal ones are equal; each digest is of SHA-256, in hex.

    Attributes:
        backend: `Selected.reference` of the one that traces.
        facts: of everything that is known of the engine.
        model: of the folder's path, configurations and code.
        tensors: of names, shapes and dtypes, in their order.
        software: of the names and versions of all that is installed, and of the text of weightlane and of the
            plugin.
        machine: of the host, its kind, and the variables of the environment that are the engine's or torch's.
    """

    engine: str
    engine_version: str
    backend: str
    tensor_parallel: int
    lora: bool
    facts: str
    model: str
    tensors: str
    software: str
    machine: str


def built_from(
    selected: Selected, package: str, context: TraceModelContext, environ: Mapping[str, str]
) -> BuiltFrom | Untraced:
    """What a trace of `context.model` rests on, or why that cannot be told.

    Args:
        selected: the backend that traces.
        package: the plugin's import package; "" where it has none.
        context: what the trace would be asked.
        environ: of this process.

    Raises:
        OSError: the model's folder cannot be read.
    """
    descriptor, facts = context.descriptor, context.facts
    installed = find_distribution(descriptor.distributions)
    if installed is not None and _is_editable(installed):
        why = f"{installed.metadata['Name']} runs from a working tree, which may change under one version"
        return Untraced(why)
    prefixes = (*_VARIABLES, f"{facts.engine.upper()}_")
    variables = sorted((name, value) for name, value in environ.items() if name.startswith(prefixes))
    return BuiltFrom(
        engine=facts.engine,
        engine_version=facts.version,
        backend=selected.reference,
        tensor_parallel=context.tensor_parallel,
        lora=context.lora,
        facts=_digest([msgspec.json.encode(facts, order="deterministic")]),
        model=_digest(_model(Path(context.model).resolve())),
        tensors=_digest([msgspec.msgpack.encode(context.tensors)]),
        software=_digest([*_installed(), *_sources(_CORE), *_sources(package)]),
        machine=_digest([msgspec.json.encode((platform.node(), platform.machine(), variables))]),
    )


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()


def _model(folder: Path) -> Iterable[bytes]:
    yield os.fsencode(folder)
    for path in sorted(folder.rglob("*")):
        if path.suffix in _MODEL_FILES and path.is_file():
            yield os.fsencode(path.relative_to(folder))
            yield path.read_bytes()


def _installed() -> Iterable[bytes]:
    """The name of each distribution's folder of metadata, which has its version; to read them takes long."""
    yield platform.python_version().encode()
    yield from sorted({os.fsencode(name) for name in _metadata_folders()})


def _metadata_folders() -> Iterable[str]:
    for place in sys.path:
        if Path(place or ".").is_dir():
            yield from (path.name for path in Path(place or ".").iterdir() if path.name.endswith(_METADATA))


def _sources(package: str) -> Iterable[bytes]:
    """The text of a package, which may change under one version where it runs from a working tree."""
    found = importlib.util.find_spec(package) if package else None
    for folder in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(folder).rglob("*.py")):
            yield os.fsencode(path)
            yield path.read_bytes()


def _is_editable(installed: metadata.Distribution) -> bool:
    """By PEP 610: `direct_url.json` of a folder that was installed as it lies."""
    try:
        told = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return True  # nothing can be said of it
    return isinstance(told, dict) and bool(told.get("dir_info", {}).get("editable"))
