"""The snapshots that the plugin carries are whole, what their names say, and where a reader looks."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from weightlane.registry import Registry
from weightlane.trace.contract_files import contract_name, known_contracts
from weightlane.trace.contract_text import parse_contract

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "plugins/sglang/src/weightlane_sglang/contracts"
FILES = sorted(FOLDER.glob("*/*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_is_of_what_its_name_says_and_covers_it(path: Path) -> None:
    contract = parse_contract(path.read_text(), origin=str(path))
    name = contract_name(contract.architecture, contract.tensor_parallel, lora=contract.lora)
    assert (contract.engine, contract.engine_version, name) == ("sglang", path.parent.name, path.name)
    assert (contract.uncovered, contract.refused) == ((), ())
    assert all(line.places for line in contract.lines)


def test_every_era_names_the_package_that_holds_them_and_the_documentation_shows_the_very_files() -> None:
    backends = [
        item.descriptor for item in Registry().load().backends() if item.descriptor.engine == "sglang"
    ]
    assert {item.contracts for item in backends} == {"weightlane_sglang"}
    assert set(known_contracts(backends[0])) == {"0.5.18", "0.5.23"}
    link = ROOT / "docs/contracts/sglang"
    assert link.is_symlink()
    assert link.resolve() == FOLDER.resolve()


def test_there_is_one_of_each_layout_that_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    layouts = runpy.run_path(str(ROOT / "docs/contract_snapshots_live.py"))["LAYOUTS"]
    names = {contract_name(item.architecture, item.workers, lora=item.lora): item.newer for item in layouts}
    assert {path.name for path in FILES if path.parent.name == "0.5.18"} == set(names)
    assert {path.name for path in FILES if path.parent.name == "0.5.23"} == {
        name for name, newer in names.items() if newer
    }
