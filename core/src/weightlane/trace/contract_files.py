"""Where contract snapshots lie, and which is the one of an engine: `contracts/VERSION/NAME.txt` of a package.

A backend's descriptor names the package (`contracts`). Only a file is looked for: no engine is imported.
"""

from __future__ import annotations

import importlib.resources
import re
from typing import TYPE_CHECKING

from weightlane.errors import ContractError, near_names
from weightlane.trace.contract_text import parse_contract
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from weightlane.trace.contract import Contract
    from weightlane.types import BackendDescriptor

FOLDER = "contracts"
_BUILT_HERE = "without --to, where its model can be built here without data"
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def contract_name(architecture: str, tensor_parallel: int, *, lora: bool) -> str:
    """The file that such a contract is in, below the folder of its version."""
    return f"{architecture}-tp{tensor_parallel}{'-lora' if lora else ''}.txt"


def find_contract(
    descriptor: BackendDescriptor, version: str, architecture: str, *, tensor_parallel: int = 1, lora: bool
) -> Contract | Untraced:
    """The snapshot of exactly this, or why there is none and the command that makes one.

    A build of a version (`0.32.0+cpu`) is taken for that version; a neighbouring version never is.

    Raises:
        ContractError: the file is damaged.
    """
    wanted = contract_name(architecture, tensor_parallel, lora=lora)
    folder = _folder(descriptor)
    for number in dict.fromkeys((version, version.partition("+")[0])):
        if folder is None or not _SAFE.fullmatch(number) or not _SAFE.fullmatch(wanted):
            continue
        file = folder / number / wanted
        if file.is_file():
            origin = f"{descriptor.contracts}/{FOLDER}/{number}/{wanted}"
            return parse_contract(file.read_text(encoding="utf-8"), origin=origin)
    return Untraced(_absence(descriptor, version, wanted))


def read_contract(descriptor: BackendDescriptor, version: str, name: str) -> Contract:
    """The snapshot of this version by its file's name.

    Raises:
        ContractError: there is none, with near ones, or it is damaged.
    """
    folder, shown = _folder(descriptor), name.removesuffix(".txt")
    there = known_contracts(descriptor)
    names = there.get(version, ())
    if folder is None or name not in names:
        near = ", ".join(near_names(name, names) or names[:3])
        versions = ", ".join(there) or "none at all"
        raise ContractError(
            f"There is no snapshot {shown} of {descriptor.engine} {version}.",
            f"Near: {near}." if near else f"Versions with snapshots: {versions}.",
            f"Make it: {making_command(descriptor.engine)}; {_BUILT_HERE}.",
        )
    text = (folder / version / name).read_text(encoding="utf-8")
    return parse_contract(text, origin=f"{descriptor.contracts}/{FOLDER}/{version}/{name}")


def known_contracts(descriptor: BackendDescriptor) -> dict[str, tuple[str, ...]]:
    """File names by version, both sorted; empty where the backend has no snapshots."""
    folder = _folder(descriptor)
    if folder is None:
        return {}
    versions = sorted(item.name for item in folder.iterdir() if item.is_dir() and _SAFE.fullmatch(item.name))
    return {
        version: tuple(
            sorted(item.name for item in (folder / version).iterdir() if item.name.endswith(".txt"))
        )
        for version in versions
    }


def making_command(engine: str) -> str:
    """What makes a snapshot of an engine that runs."""
    return f"weightlane plan DIR --engine {engine} --to ADDRESS --write-contract FOLDER"


def _folder(descriptor: BackendDescriptor) -> Traversable | None:
    if not descriptor.contracts:
        return None
    try:
        folder = importlib.resources.files(descriptor.contracts) / FOLDER
    except ModuleNotFoundError:
        return None
    return folder if folder.is_dir() else None


def _absence(descriptor: BackendDescriptor, version: str, wanted: str) -> str:
    there = known_contracts(descriptor)
    with_it = [number for number, names in there.items() if wanted in names]
    others = f"there is one of {', '.join(with_it)}, which is not taken for it; " if with_it else ""
    shown = wanted.removesuffix(".txt")
    return (
        f"there is no snapshot {shown} of {descriptor.engine} {version or 'of unknown version'}; {others}"
        f"where the engine runs, {making_command(descriptor.engine)} makes one; {_BUILT_HERE}"
    )
