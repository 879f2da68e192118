"""Negative controls: each rule of the registry undone, and the harm that it prevents seen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

import weightlane.candidates
import weightlane.discovery
import weightlane.loading
import weightlane.registry
import weightlane.selection
from weightlane.errors import SelectionError
from weightlane.facts import EngineFacts
from weightlane.selection import select

if TYPE_CHECKING:
    from conftest import FakeSite

    from weightlane.registry import Registry

FACTS = EngineFacts(engine="acme", version="1.5", source="worker")
pytestmark = pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")


def selected(registry: Registry, **arguments: Any) -> str:
    return str(select(registry, "rollout", "acme", FACTS, **arguments).distribution)


def test_without_the_error_of_a_tie_the_order_of_names_would_select(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a-lane", "z-lane"):
        site.plugin(name, site.source())
    with pytest.raises(SelectionError, match="fit acme equally well"):
        selected(site.load())
    monkeypatch.setattr(weightlane.selection, "raise_tie", lambda engine, winners: None)
    assert selected(site.load()) == "a-lane"
    site.plugin("0-lane", site.source())
    assert selected(site.load()) == "0-lane"  # a package more, and another plugin runs


def test_without_the_deny_list_a_disabled_plugin_would_be_imported(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = site.plugin("acme-lane", site.source())
    site.environ["WEIGHTLANE_DISABLE_PLUGINS"] = "acme-lane"
    site.load()
    assert module not in sys.modules
    monkeypatch.setattr(weightlane.discovery.DenyList, "denies", lambda self, entry: False)
    site.load()
    assert module in sys.modules


def test_without_isolation_a_broken_plugin_would_stop_the_others(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("broken-lane", "raise ImportError('no libacme.so')")
    site.plugin("good-lane", site.source())
    assert selected(site.load()) == "good-lane"
    monkeypatch.setattr(weightlane.registry, "load_entry", lambda manager, entry: entry.point.load())
    with pytest.raises(ImportError):
        site.load()


def test_without_the_conflict_a_second_distribution_would_take_the_name(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("real-lane", site.source(), entry="acme")
    site.plugin(
        "fork-lane", site.source().replace("capabilities=", "priority=1, capabilities="), entry="acme"
    )
    assert {item.state for item in site.load().statuses()} == {"conflict"}
    monkeypatch.setattr(weightlane.registry, "clashing_names", lambda entries: {})
    assert selected(site.load()) == "fork-lane"


def test_without_the_contract_version_a_plugin_of_the_future_would_be_called(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("acme-lane", site.source(api="(9, 0)"))
    with pytest.raises(SelectionError, match=r"weightlane contract 9.0"):
        selected(site.load())
    monkeypatch.setattr(weightlane.loading, "api_refusal", lambda descriptor: "")
    monkeypatch.setattr(weightlane.candidates, "api_refusal", lambda descriptor: "")
    assert selected(site.load()) == "acme-lane"


def test_without_the_check_a_typoed_hook_would_be_passed_over_in_silence(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "@hookimpl\ndef weightlane_map_name(context):\n    return ()\n"
    site.plugin("acme-lane", site.source(more=more))
    assert site.status(site.load(), "acme-lane").state == "broken"
    monkeypatch.setattr(weightlane.loading, "_check_implementations", lambda manager, plugin: None)
    registry = site.load()
    assert site.status(registry, "acme-lane").state == "active"
    assert not registry.implements(registry.backends()[0], "weightlane_map_names")


def test_without_the_rules_of_descriptors_one_plugin_would_stop_the_choice_among_others(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("bad-lane", site.source().replace('SpecifierSet(">=1,<2")', '">=1,<2"'))
    site.plugin("good-lane", site.source())
    assert selected(site.load()) == "good-lane"
    monkeypatch.setattr(weightlane.loading, "require_sound", lambda descriptor: None)
    with pytest.raises(AttributeError):
        selected(site.load())


def test_without_the_pin_the_plugin_that_was_not_wanted_would_be_taken(site: FakeSite) -> None:
    site.plugin("mine-lane", site.source(), version="1.0")
    site.plugin("their-lane", site.source().replace("capabilities=", "priority=9, capabilities="))
    assert selected(site.load(), pin="mine-lane==1.*") == "mine-lane"
    assert selected(site.load()) == "their-lane"


def test_pluggy_alone_names_nobody_in_an_error(site: FakeSite) -> None:
    more = "@hookimpl\ndef weightlane_plan_launch(context):\n    raise KeyError('max_loras')\n"
    site.plugin("acme-lane", site.source(more=more))
    registry = site.load()
    with pytest.raises(KeyError) as caught:
        registry._manager.hook.weightlane_plan_launch(context=None)
    assert "acme" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("versions=", '">=1"', "versions must be a packaging SpecifierSet, not '>=1'"),
        ("probe=", "None", "probe must be a function, not None"),
        ("capabilities=", "['receive-full']", "capabilities must be a frozenset of Capability"),
        ("role=", "'rolout'", "role must be trainer or rollout, not 'rolout'"),
        ("era=", "''", "era must be a name, not ''"),
        ("distributions=", "'acme-engine'", "distributions must be a tuple of names"),
        ("priority=", "'high'", "priority must be a number, not 'high'"),
        ("api_version=", "'0.1'", "api_version must be a tuple of numbers, not '0.1'"),
    ],
)
def test_a_descriptor_says_which_field_is_wrong(site: FakeSite, field: str, value: str, error: str) -> None:
    source = site.source().replace("return [Back", "return [changed(Back").replace(",\n    )]", ",\n    ))]")
    head = f"import dataclasses\ndef changed(one):\n    return dataclasses.replace(one, {field}{value})\n"
    site.plugin("acme-lane", head + source)
    status = site.status(site.load(), "acme-lane")
    assert (status.state, error in status.error) == ("broken", True), status.error
