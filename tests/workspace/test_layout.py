from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Distribution

ENGINES = {"vllm", "sglang", "megatron-core", "ray"}


def test_no_folder_above_a_package_is_importable_as_one(root: Path) -> None:
    # With plugins/ on the path, `import vllm` would find plugins/vllm.
    assert not (root / "plugins/__init__.py").exists()
    assert not list(root.glob("plugins/*/__init__.py"))
    assert not list(root.glob("plugins/*/src/__init__.py"))


def test_no_test_folder_is_a_package(root: Path) -> None:
    assert not list((root / "tests").rglob("__init__.py"))


def test_every_distribution_is_typed(distributions: dict[str, Distribution]) -> None:
    for distribution in distributions.values():
        assert (distribution.package / "py.typed").is_file(), distribution.name


def test_every_distribution_has_one_top_level_package(distributions: dict[str, Distribution]) -> None:
    for distribution in distributions.values():
        folders = [p.name for p in (distribution.folder / "src").iterdir() if p.name != "__pycache__"]
        assert folders == [distribution.package.name]
        wheel = distribution.pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert wheel["packages"] == [f"src/{distribution.package.name}"]


def test_uv_knows_every_distribution(
    root: Path, root_pyproject: dict[str, Any], distributions: dict[str, Distribution]
) -> None:
    uv = root_pyproject["tool"]["uv"]
    assert uv["sources"] == {name: {"workspace": True} for name in distributions}
    members = {folder for pattern in uv["workspace"]["members"] for folder in root.glob(pattern)}
    assert members == {distribution.folder for distribution in distributions.values()}


def test_uv_is_told_that_engine_extras_conflict(root_pyproject: dict[str, Any]) -> None:
    pairs = [
        {(c["package"], c["extra"]) for c in group} for group in root_pyproject["tool"]["uv"]["conflicts"]
    ]
    assert {("weightlane-vllm", "vllm"), ("weightlane-sglang", "sglang")} in pairs


def test_the_root_is_no_distribution(root_pyproject: dict[str, Any]) -> None:
    assert "project" not in root_pyproject


def test_no_engine_is_a_hard_requirement(distributions: dict[str, Distribution]) -> None:
    for distribution in distributions.values():
        names = {Requirement(text).name for text in distribution.pyproject["project"]["dependencies"]}
        assert not names & ENGINES, distribution.name


def test_entry_points_name_modules_of_their_own_distribution(distributions: dict[str, Distribution]) -> None:
    # Attributed to one distribution each, or a status could not say whose plugin is broken.
    for distribution in distributions.values():
        entries = distribution.pyproject["project"].get("entry-points", {}).get("weightlane", {})
        for name, module in entries.items():
            package, _, rest = module.partition(".")
            assert package == distribution.package.name, name
            path = distribution.package.joinpath(*rest.split("."))
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


def test_distributions_without_a_backend_register_nothing(distributions: dict[str, Distribution]) -> None:
    for name in ("weightlane-megatron",):
        assert "entry-points" not in distributions[name].pyproject["project"]
        assert "registers nothing" in (distributions[name].package / "__init__.py").read_text()
