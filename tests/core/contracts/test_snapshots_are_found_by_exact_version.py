"""Only the snapshot of the very version is taken; where there is none, the way to one is told."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from packaging.specifiers import SpecifierSet

from weightlane.errors import ContractError
from weightlane.probes import always_viable
from weightlane.trace.contract import Contract
from weightlane.trace.contract_files import contract_name, find_contract, known_contracts, read_contract
from weightlane.trace.contract_text import contract_text
from weightlane.trace.table import Untraced
from weightlane.types import BackendDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "FakeForCausalLM-tp1.txt"


@pytest.fixture
def package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_config: Callable[..., Any],
    contract_of: Callable[..., Contract],
) -> Path:
    """An installed package that holds the snapshot of acme 1.0."""
    folder = tmp_path / "fake_acme_plugin"
    (folder / "contracts/1.0").mkdir(parents=True)
    (folder / "contracts/1.0" / NAME).write_text(contract_text(contract_of(fake_config())))
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder


def descriptor(package: str = "fake_acme_plugin") -> BackendDescriptor:
    return BackendDescriptor(
        name="acme",
        role="rollout",
        engine="acme",
        era="any",
        versions=SpecifierSet(">=1"),
        distributions=("acme",),
        probe=always_viable,
        capabilities=frozenset(),
        contracts=package,
    )


def found(version: str, architecture: str = "FakeForCausalLM", **options: Any) -> Contract | Untraced:
    return find_contract(descriptor(), version, architecture, **{"lora": False, **options})


@pytest.mark.parametrize("version", ["1.0", "1.0+cpu"])
def test_the_version_itself_is_found(package: Path, version: str) -> None:
    contract = found(version)
    assert isinstance(contract, Contract)
    assert contract.title == "acme 1.0 FakeForCausalLM"
    assert known_contracts(descriptor()) == {"1.0": (NAME,)}
    assert read_contract(descriptor(), "1.0", NAME) == contract


@pytest.mark.parametrize("version", ["1.0.1", "0.9", "1", "", "../1.0", "1.0/"])
def test_a_neighbour_is_never_taken(package: Path, version: str) -> None:
    missing = found(version)
    assert isinstance(missing, Untraced)
    assert "there is one of 1.0, which is not taken for it" in missing.reason
    assert (
        "weightlane plan DIR --engine acme --to ADDRESS --write-contract FOLDER makes one" in missing.reason
    )


@pytest.mark.parametrize(
    "other", [{"tensor_parallel": 2}, {"lora": True}, {"architecture": "OtherForCausalLM"}]
)
def test_another_layout_or_architecture_is_not_taken_either(package: Path, other: dict[str, Any]) -> None:
    missing = found("1.0", **other)
    assert isinstance(missing, Untraced)
    assert "which is not taken" not in missing.reason


def test_names_tell_what_they_are_of() -> None:
    assert contract_name("A", 2, lora=True) == "A-tp2-lora.txt"


def test_a_backend_without_snapshots_has_none() -> None:
    for package in ("", "fake_package_that_is_not_there", "weightlane"):
        assert known_contracts(descriptor(package)) == {}
        assert isinstance(find_contract(descriptor(package), "1.0", "A", lora=False), Untraced)


def test_what_cannot_be_read_is_an_error_with_near_ones(package: Path) -> None:
    with pytest.raises(ContractError, match=r"no snapshot FakeForCausalLM-tp2 of acme 1\.0.*Near: FakeFor"):
        read_contract(descriptor(), "1.0", "FakeForCausalLM-tp2.txt")
    with pytest.raises(ContractError, match=r"Versions with snapshots: 1\.0"):
        read_contract(descriptor(), "2.0", NAME)
    path = package / "contracts/1.0" / NAME
    path.write_text(path.read_text() + "more\n")
    with pytest.raises(ContractError, match=r"fake_acme_plugin/contracts/1\.0/FakeForCausalLM-tp1\.txt"):
        found("1.0")
