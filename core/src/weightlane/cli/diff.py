"""`weightlane diff`: what two versions of an engine do otherwise with one architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from weightlane.cli import FAILED, WELL
from weightlane.cli.output import print_json, print_line, print_lines
from weightlane.errors import SelectionError, UsageError, near_names
from weightlane.registry import get_registry
from weightlane.trace.contract_diff import Difference, contract_differences
from weightlane.trace.contract_files import contract_name, known_contracts, making_command, read_contract

if TYPE_CHECKING:
    from weightlane.registry import Registry
    from weightlane.trace.contract import Contract
    from weightlane.types import BackendDescriptor

app = typer.Typer(add_completion=False)

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


class Compared(msgspec.Struct, frozen=True):
    """What `diff --json` prints; no difference means exit status 0."""

    engine: str
    before: str
    after: str
    contract: str
    differences: tuple[Difference, ...]


@app.command("diff")
def diff(
    engine: Annotated[str, typer.Argument(help="Rollout engine whose backend has snapshots, such as vllm.")],
    before: Annotated[str, typer.Argument(help="Version, such as 0.27.1.")],
    after: Annotated[str, typer.Argument(help="Version to compare with it.")],
    arch: Annotated[str, typer.Option("--arch", metavar="NAME", help="Architecture, as in config.json.")],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel workers.")] = 1,
    lora: Annotated[bool, typer.Option("--lora", help="With LoRA on.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Tell what two versions of an engine do otherwise with the checkpoint of one architecture.

    Read from the contract snapshots that the engine's plugin carries; neither version needs to be installed.
    Exit status 0: they do the same. Exit status 1: they differ, or there is no such snapshot. Exit status 2:
    wrong usage, or the command itself broke.
    """
    found = compare(get_registry(), engine, (before, after), contract_name(arch, tp, lora=lora))
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(FAILED if found.differences else WELL)


def compare(registry: Registry, engine: str, versions: tuple[str, str], name: str) -> Compared:
    """Compares the snapshots of two versions.

    Raises:
        SelectionError: no backend of the engine has snapshots.
        ContractError: there is no such snapshot of a version, or it is damaged.
        UsageError: both versions are the same.
    """
    if versions[0] == versions[1]:
        raise UsageError(
            f"{versions[0]} is compared with itself.",
            fix="Name two versions.",
        )
    descriptors = _with_contracts(registry, engine)
    before, after = (_read(descriptors, version, name) for version in versions)
    return Compared(
        engine, *versions, name.removesuffix(".txt"), differences=contract_differences(before, after)
    )


def _with_contracts(registry: Registry, engine: str) -> tuple[BackendDescriptor, ...]:
    own = [item.descriptor for item in registry.backends() if item.descriptor.engine == engine]
    found = {item.contracts: item for item in own if item.contracts}
    if not found:
        near = ", ".join(near_names(engine, registry.engines()))
        written = f"Where {engine} is installed, {making_command(engine)} writes one for its plugin."
        raise SelectionError(
            f"No backend of {engine} has contract snapshots.",
            f"Near: {near}." if near else f"Engines with a backend: {', '.join(registry.engines())}.",
            f"Install the plugin that serves {engine}; `weightlane doctor` tells which there are."
            if not own
            else written,
        )
    return tuple(found.values())


def _read(descriptors: tuple[BackendDescriptor, ...], version: str, name: str) -> Contract:
    holder = next((item for item in descriptors if name in known_contracts(item).get(version, ())), None)
    return read_contract(holder or descriptors[0], version, name)


def _print(found: Compared) -> None:
    title = f"{found.engine} {found.before} and {found.after}, {found.contract}"
    if not found.differences:
        print_line(f"{title}: they do the same with every name.")
        return
    count = len(found.differences)
    print_line(f"{title}: {count} difference{'' if count == 1 else 's'}")
    for item in found.differences:
        print_line(f"\n{_SIGNS[item.change]} {item.subject}: {item.words}")
        print_lines([f"{found.before}: {item.before}"] if item.before else [], 4)
        print_lines([f"{found.after}: {item.after}"] if item.after else [], 4)
