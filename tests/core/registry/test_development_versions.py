"""R87: pre-releases, development, local and post builds of an engine, from real metadata to the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.specifiers import SpecifierSet

import weightlane.candidates
from weightlane.candidates import position_of
from weightlane.errors import SelectionError
from weightlane.notices import PluginWarning
from weightlane.selection import select

if TYPE_CHECKING:
    from conftest import FakeSite

    from weightlane.candidates import RangePosition
    from weightlane.hook_calls import Selected

VIABLE = "lambda facts: Viable(('Layer defines load_weights',))"
NOT_VIABLE = "lambda facts: NotViable('Layer does not define load_weights')"


def chosen(site: FakeSite, version: str, probe: str) -> Selected:
    """The choice for an engine of that version, by the metadata of its distribution."""
    site.engine("acme-engine", version)
    site.plugin("acme-lane", site.source(probe=probe))
    registry = site.load()
    return select(registry, "rollout", "acme", registry.collect_facts("acme"))


@pytest.mark.requirement("R87")
@pytest.mark.parametrize(
    "version",
    ["1.0", "1.5rc1", "1.2.dev3", "1.2.dev3+g0a1b2c3", "1.4+cu128", "1.0.post1", "1.9.9a0.dev1", "1!0"],
)
def test_any_kind_of_build_inside_a_range_is_taken_by_its_version(site: FakeSite, version: str) -> None:
    if version == "1!0":  # another epoch is another numbering
        with pytest.raises(SelectionError, match="it serves acme <2,>=1 and found acme 1!0"):
            chosen(site, version, "always_viable")
        return
    selected = chosen(site, version, "always_viable")
    assert selected.notes == ()
    assert selected.evidence[0] == f"acme {version} (as installed here) fits acme <2,>=1"


@pytest.mark.requirement("R87")
@pytest.mark.parametrize(
    "version", ["1.0rc1", "1.0.dev5", "2.0rc1", "2.0.dev1+g0a1b2c3", "0.1.dev1+g0a1b2c3"]
)
@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_before_a_release_that_bounds_a_range_the_capability_decides(site: FakeSite, version: str) -> None:
    (note,) = chosen(site, version, VIABLE).notes
    assert "Layer defines load_weights" in note
    site.remove("acme-lane")
    site.remove("acme-engine")
    with pytest.raises(SelectionError, match="Layer does not define load_weights"):
        chosen(site, version, NOT_VIABLE)


@pytest.mark.requirement("R87")
def test_a_nightly_build_newer_than_every_range_runs_with_a_warning_that_says_so(site: FakeSite) -> None:
    with pytest.warns(PluginWarning, match=r"acme 2\.1\.dev7 .* is newer than .* because its probe passed"):
        chosen(site, "2.1.dev7", VIABLE)


@pytest.mark.requirement("R87")
def test_a_failing_capability_beats_a_nightly_build_in_range(site: FakeSite) -> None:
    with pytest.raises(SelectionError, match=r"Layer does not .* \(although acme 1\.5\.dev2 .* fits"):
        chosen(site, "1.5.dev2", NOT_VIABLE)


@pytest.mark.parametrize(
    ("version", "versions", "position"),
    [
        ("1.5rc1", ">=1,<2", "inside"),
        ("2.0rc1", ">=1,<2", "above"),
        ("2.0rc1", ">=1,<2.0rc2", "inside"),
        ("1.0rc1", ">=1,<2", "below"),
        ("1.3rc1", ">=1,<2,!=1.3", "inside"),
        ("1.3+cpu", ">=1,<2,!=1.3", "excluded"),
        ("1.3.1rc1", ">=1,<2,!=1.3.*", "excluded"),
        ("1.4.2", "~=1.4.0", "inside"),
        ("1.5.dev1", "~=1.4.0", "above"),
        ("1.3.9", "~=1.4.0", "below"),
        ("2.0", "==1.*", "above"),
        ("", ">=1", "unknown"),
        ("main", ">=1", "unknown"),
        ("main", "", "inside"),
    ],
)
def test_where_a_version_lies(version: str, versions: str, position: RangePosition) -> None:
    assert position_of(version, SpecifierSet(versions)) == position


@pytest.mark.requirement("R87")
def test_compared_as_installers_do_a_pre_release_in_range_would_be_refused(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_installers_do(version: str, versions: SpecifierSet) -> RangePosition:
        return "inside" if versions.contains(version, prereleases=False) else "above"

    monkeypatch.setattr(weightlane.candidates, "position_of", as_installers_do)
    with pytest.raises(SelectionError, match=r"it serves acme <2,>=1 and found acme 1\.5rc1"):
        chosen(site, "1.5rc1", "always_viable")
