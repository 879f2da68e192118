"""Pins in pyproject.toml over fake distributions, and pins of an engine that nobody registers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

import weightlane.registry
from weightlane.errors import PinError, PluginError
from weightlane.facts import EngineFacts
from weightlane.notices import PluginWarning
from weightlane.selection import select

if TYPE_CHECKING:
    from conftest import FakeSite

    from weightlane.registry import Selected

FACTS = EngineFacts(engine="acme", version="1.5", source="worker")


def pin(site: FakeSite, text: str, engine: str = "acme") -> None:
    (site.folder / "pyproject.toml").write_text(f'[tool.weightlane.pins]\n{engine} = "{text}"\n')


def selected(site: FakeSite) -> Selected:
    return select(site.load(), "rollout", "acme", FACTS)


@pytest.fixture
def two_plugins(site: FakeSite) -> FakeSite:
    """One that wins by priority, and one that a pin can choose."""
    site.plugin("their-lane", site.source().replace("capabilities=", "priority=9, capabilities="))
    site.plugin("mine-lane", site.source(), version="1.2")
    return site


@pytest.mark.parametrize("text", ["mine-lane", "Mine_Lane==1.*", "mine-lane[mine-lane]>=1"])
def test_the_project_decides_and_the_evidence_says_where(two_plugins: FakeSite, text: str) -> None:
    assert selected(two_plugins).distribution == "their-lane"
    pin(two_plugins, text)
    found = selected(two_plugins)
    assert found.distribution == "mine-lane"
    assert found.evidence[-1] == (
        f"pinned to {text} by [tool.weightlane.pins] of {two_plugins.folder / 'pyproject.toml'}"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mine-lane==2.*", "mine-lane 1.2 is installed."),
        ("mine-lame", "mine-lame is not installed, or registers no plugin; there is mine-lane"),
        ("mine-lane[fast]", "mine-lane has no entry point fast; there is mine-lane."),
        ("other-lane", "other-lane registers no rollout backend for acme."),
    ],
)
def test_a_pin_of_the_project_that_cannot_be_met_is_an_error_although_another_plugin_fits(
    two_plugins: FakeSite, text: str, why: str
) -> None:
    two_plugins.plugin("other-lane", two_plugins.source(engine="other"))
    pin(two_plugins, text)
    with pytest.raises(PinError) as caught:
        selected(two_plugins)
    assert f"[tool.weightlane.pins] of {two_plugins.folder / 'pyproject.toml'}" in caught.value.what
    assert caught.value.why.startswith(why)
    (two_plugins.folder / "pyproject.toml").unlink()
    assert selected(two_plugins).distribution == "their-lane"


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_a_pin_of_the_project_settles_a_conflict(site: FakeSite) -> None:
    for name in ("one-lane", "two-lane"):
        site.plugin(name, site.source(), entry="acme")
    with pytest.raises(PluginError, match=r"one-lane 1\.0, two-lane 1\.0"):
        selected(site)
    site.forget_modules()
    pin(site, "two-lane")
    assert selected(site).distribution == "two-lane"


# -- pins of an engine that nobody registers --------------------------------------------------------------


@pytest.mark.parametrize("strict", ["", "1"])
def test_an_engine_that_is_misspelt_in_a_pin_is_warned_of_with_the_near_one(
    two_plugins: FakeSite, strict: str
) -> None:
    two_plugins.environ["WEIGHTLANE_STRICT_PLUGINS"] = strict
    two_plugins.environ["WEIGHTLANE_PIN_ACNE"] = "mine-lane"
    pin(two_plugins, "mine-lane", engine="acmee")
    with pytest.warns(PluginWarning) as shown:
        two_plugins.load()
    project = f"[tool.weightlane.pins] of {two_plugins.folder / 'pyproject.toml'}"
    assert {str(item.message) for item in shown} == {
        f"{project} pins engine ACMEE, which no plugin registers; near: ACME.",
        "environment variable WEIGHTLANE_PIN_ACNE pins engine ACNE, which no plugin registers; near: ACME.",
    }


def test_without_that_warning_another_plugin_would_be_taken_in_silence(
    two_plugins: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_plugins.environ["WEIGHTLANE_PIN_ACNE"] = "mine-lane"
    monkeypatch.setattr(weightlane.registry, "warn_of_stray_pins", lambda pins, engines: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selected(two_plugins).distribution == "their-lane"


@pytest.mark.parametrize("engine", ["acme", "vllm"])
def test_a_pin_that_is_met_or_of_an_engine_that_is_not_here_is_no_mistake(
    two_plugins: FakeSite, engine: str
) -> None:
    pin(two_plugins, "mine-lane", engine=engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two_plugins.load()
