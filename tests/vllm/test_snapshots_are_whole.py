"""The snapshots that the plugin carries are whole, what their names say, and where a reader looks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from weightlane.registry import Registry
from weightlane.trace.contract_files import contract_name, known_contracts
from weightlane.trace.contract_text import parse_contract

if TYPE_CHECKING:
    from weightlane.trace.contract import Contract

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "plugins/vllm/src/weightlane_vllm/contracts"
FILES = sorted(FOLDER.glob("*/*.txt"))


def read(path: Path) -> Contract:
    return parse_contract(path.read_text(), origin=str(path))


def test_there_are_some_and_nothing_else() -> None:
    assert {path.name for path in FOLDER.iterdir()} >= {"0.32.0"}
    assert [path for path in FOLDER.rglob("*") if path.is_file() and path not in FILES] == []
    assert "LlamaForCausalLM-tp1-lora.txt" in {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_is_of_what_its_name_says_and_covers_it(path: Path) -> None:
    contract = read(path)
    name = contract_name(contract.architecture, contract.tensor_parallel, lora=contract.lora)
    assert (contract.engine, contract.engine_version, name) == ("vllm", path.parent.name, path.name)
    assert contract.uncovered == ()
    assert contract.refused == ()
    assert all(line.places or line.dropped.startswith("tied to ") for line in contract.lines)
    packed = {group.target.rpartition(".self_attn.")[2].partition(".")[0] for group in contract.groups}
    # Phi-3 holds them packed in its checkpoint.
    assert ("qkv_proj" in packed) == (contract.architecture != "Phi3ForCausalLM")


def test_the_documentation_shows_the_very_files() -> None:
    link = ROOT / "docs/contracts/vllm"
    assert link.is_symlink()
    assert link.resolve() == FOLDER.resolve()


def test_every_era_of_the_engine_names_the_package_that_holds_them() -> None:
    backends = [item.descriptor for item in Registry().load().backends() if item.descriptor.engine == "vllm"]
    assert backends
    assert {item.contracts for item in backends} == {"weightlane_vllm"}
    assert set(known_contracts(backends[0])) == {path.name for path in FOLDER.iterdir()}
