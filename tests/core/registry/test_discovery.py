"""Finding entry points: by the metadata of each distribution alone, whatever state another's is in."""

from __future__ import annotations

import os
import sys
import zipfile
from importlib.metadata import DistributionFinder, MetadataPathFinder, entry_points
from typing import TYPE_CHECKING

import pytest

from weightlane.discovery import find_entries
from weightlane.errors import PluginError
from weightlane.notices import PluginWarning
from weightlane.selection import select

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakeSite


def info(site: FakeSite, distribution: str, version: str = "1.0") -> Path:
    return site.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"


def lose_metadata(site: FakeSite) -> None:
    (info(site, "bad-lane") / "METADATA").unlink()


def lose_the_name(site: FakeSite) -> None:
    (info(site, "bad-lane") / "METADATA").write_text("Metadata-Version: 2.1\n\nName: in-the-readme\n")


def garble_entry_points(site: FakeSite) -> None:
    (info(site, "bad-lane") / "entry_points.txt").write_text("[weightlane]\nthis is no entry\n")


def name_no_module(site: FakeSite) -> None:
    (info(site, "bad-lane") / "entry_points.txt").write_text("[weightlane]\nbad-lane = two words\n")


def upgrade_halfway(site: FakeSite) -> None:
    newer = info(site, "bad-lane", "1.1")
    newer.mkdir()
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-lane\nVersion: 1.1\n")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lose_metadata, "METADATA names no distribution"),
        (lose_the_name, "METADATA names no distribution"),
        (garble_entry_points, "the line 'this is no entry', which is no entry"),
        (name_no_module, "'two words', and must be a module or module:object"),
        (upgrade_halfway, "bad_lane-1.1.dist-info stands beside it"),
    ],
)
def test_a_damaged_distribution_is_broken_and_stops_no_other(
    site: FakeSite, damage: Callable[[FakeSite], None], error: str
) -> None:
    site.plugin("bad-lane", site.source(engine="bad"))
    site.plugin("good-lane", site.source(engine="good"))
    assert [item.state for item in site.load().statuses()] == ["active", "active"]
    damage(site)
    site.forget_modules()
    with pytest.warns(PluginWarning, match=error):
        registry = site.load()
    assert site.status(registry, "bad-lane").state == "broken"
    assert [item.distribution for item in registry.backends()] == ["good-lane"]


def test_the_standard_search_would_have_been_stopped_by_it(site: FakeSite) -> None:
    site.plugin("bad-lane", site.source())
    garble_entry_points(site)
    with pytest.raises(Exception, match="missing 1 required positional argument"):
        entry_points(group="weightlane")


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_asking_for_a_damaged_plugin_says_what_to_do(site: FakeSite) -> None:
    site.plugin("acme", site.source())
    (info(site, "acme") / "METADATA").unlink()
    registry = site.load()
    with pytest.raises(PluginError, match=r"damaged .*install it again.*pip install -U acme"):
        select(registry, "rollout", "acme", registry.collect_facts("acme"))


def test_of_two_folders_the_first_on_the_path_counts_as_imports_have_it(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", site.source(), version="1.0")
    first = tmp_path / "first"
    (first / "acme_lane-2.0.dist-info").mkdir(parents=True)
    (first / "acme_lane-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: Acme.Lane\nVersion: 2.0\n"
    )
    assert "acme-lane" in {entry.distribution for entry in find_entries()}
    monkeypatch.syspath_prepend(str(first))
    assert "acme-lane" not in {entry.distribution for entry in find_entries()}  # 2.0 has no plugin


def test_plugins_in_a_zip_file_and_of_other_finders_are_found(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zipped-lane", "found-lane"):
        site.plugin(name, site.source())
    archive = tmp_path / "plugins.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in info(site, "zipped-lane").iterdir():
            file.write(path, f"zipped_lane-1.0.dist-info/{path.name}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    info(site, "found-lane").rename(elsewhere / "found_lane-1.0.dist-info")
    site.remove("zipped-lane")

    class FakeFinder:
        @staticmethod
        def find_spec(*arguments: object) -> None:
            return None

        @staticmethod
        def find_distributions(context: object) -> object:
            place = DistributionFinder.Context(path=[str(elsewhere)])
            return MetadataPathFinder.find_distributions(place)

    def found() -> set[str]:
        return {entry.distribution for entry in find_entries()} & {"zipped-lane", "found-lane"}

    assert found() == set()
    monkeypatch.setattr(sys, "path", [*sys.path, str(archive)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, FakeFinder])
    assert found() == {"zipped-lane", "found-lane"}


def test_what_is_found_here_is_what_the_standard_search_finds(site: FakeSite) -> None:
    site.plugin("acme-lane", site.source(), entry="acme")
    standard = {(point.name, point.value) for point in entry_points(group="weightlane")}
    assert {(entry.name, entry.point.value) for entry in find_entries()} == standard
    assert ("acme", "fake_acme_lane") in standard


def test_a_folder_that_cannot_be_read_is_passed_over(
    site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", site.source())
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), os.devnull, *sys.path])
    assert "acme-lane" in {entry.distribution for entry in find_entries()}
