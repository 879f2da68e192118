"""Discovery and loading: each rule on real entry points of fake distributions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import weightlane.discovery
import weightlane.registry
from weightlane.discovery import find_entries
from weightlane.errors import PluginError
from weightlane.notices import PluginWarning
from weightlane.registry import Registry, get_registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import FakeSite


def test_an_installed_plugin_is_active_and_lists_its_hooks_and_engines(site: FakeSite) -> None:
    more = """
    @hookimpl
    def weightlane_map_names(context):
        return ()
    """
    site.plugin("acme-lane", site.source(more=more), entry="acme", version="1.2")
    registry = site.load()
    status = site.status(registry, "acme-lane")
    assert (status.name, status.version, status.state) == ("acme", "1.2", "active")
    assert status.hooks == ("weightlane_map_names", "weightlane_register_backends")
    assert status.engines == ("acme",)
    (backend,) = registry.backends()
    assert (backend.descriptor.name, backend.distribution) == ("acme", "acme-lane")


@pytest.fixture
def unsorted_site(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """Three plugins, each in a folder of its own; those folders stand on the path in another order."""
    for distribution in ("midway", "alpha", "zeta"):  # each is put before those that are there
        site.plugin(distribution, site.source(engine=distribution))
        folder = site.folder.parent / f"at-{distribution}"
        folder.mkdir()
        (site.folder / f"{distribution}-1.0.dist-info").rename(folder / f"{distribution}-1.0.dist-info")
        monkeypatch.syspath_prepend(str(folder))
    return site


def found_and_imported(site: FakeSite) -> tuple[list[str], list[str]]:
    """Names in the order in which entry points are found, and in that in which modules are imported."""
    found = [entry.name for entry in find_entries() if entry.point.value.startswith("fake_")]
    site.forget_modules()
    site.load()
    return found, [name.removeprefix("fake_") for name in sys.modules if name.startswith("fake_")]


def test_entry_points_are_found_and_imported_in_the_order_of_names(unsorted_site: FakeSite) -> None:
    names = ["alpha", "midway", "zeta"]
    assert found_and_imported(unsorted_site) == (names, names)


def test_without_the_sorting_the_path_would_give_the_order(
    unsorted_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightlane.discovery, "sorted", lambda items, key=None: list(items), raising=False)
    names = ["zeta", "alpha", "midway"]
    assert found_and_imported(unsorted_site) == (names, names)


@pytest.mark.parametrize("denied", ["acme", "acme-lane", "ACME_lane", "*", "other , acme"])
def test_a_disabled_plugin_is_never_imported(site: FakeSite, denied: str) -> None:
    module = site.plugin("acme-lane", site.source(), entry="acme")
    site.environ["WEIGHTLANE_DISABLE_PLUGINS"] = denied
    registry = site.load()
    assert site.status(registry, "acme-lane").state == "disabled"
    assert "WEIGHTLANE_DISABLE_PLUGINS" in site.status(registry, "acme-lane").error
    assert module not in sys.modules
    assert registry.backends() == ()


def test_without_the_deny_list_the_same_plugin_is_imported(site: FakeSite) -> None:
    module = site.plugin("acme-lane", site.source(), entry="acme")
    site.load()
    assert module in sys.modules


def test_a_misspelt_name_in_the_deny_list_is_warned_of(site: FakeSite) -> None:
    site.plugin("acme-lane", site.source(), entry="acme")
    site.environ["WEIGHTLANE_DISABLE_PLUGINS"] = "acme-lame"
    with pytest.warns(PluginWarning, match="acme-lame.*near: acme-lane"):
        site.load()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ImportError('no libacme.so')", "ImportError: no libacme.so"),
        ("import acme_engine_that_is_not_there", "ModuleNotFoundError: .*acme_engine_that_is_not_there"),
        ("raise SystemExit('acme wants to go home')", "SystemExit: acme wants to go home"),
        ("this is no python", "SyntaxError"),
    ],
)
def test_a_plugin_that_fails_to_import_is_broken_and_stops_no_other(
    site: FakeSite, source: str, error: str
) -> None:
    site.plugin("broken-lane", source)
    site.plugin("good-lane", site.source())
    with pytest.warns(PluginWarning, match=f"broken-lane .*is broken: its import failed: {error}"):
        registry = site.load()
    assert site.status(registry, "broken-lane").state == "broken"
    assert site.status(registry, "good-lane").state == "active"
    assert [item.distribution for item in registry.backends()] == ["good-lane"]


def test_the_cause_of_a_broken_plugin_is_kept(site: FakeSite) -> None:
    site.plugin("broken-lane", "raise ImportError('no libacme.so')")
    with pytest.warns(PluginWarning):
        registry = site.load()
    cause = registry.cause_of(site.status(registry, "broken-lane"))
    assert isinstance(cause, ImportError)
    assert cause.__traceback__ is not None


@pytest.mark.filterwarnings("error")
def test_a_warning_is_shown_once(site: FakeSite) -> None:
    site.plugin("broken-lane", "raise ImportError('no')")
    with pytest.warns(PluginWarning):
        site.load()
    site.load()


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_strict_mode_raises_what_would_be_a_warning(site: FakeSite, value: str) -> None:
    site.plugin("broken-lane", "raise ImportError('no libacme.so')")
    site.environ["WEIGHTLANE_STRICT_PLUGINS"] = value
    with pytest.raises(PluginError, match=r"broken-lane.*no libacme.so.*WEIGHTLANE_STRICT_PLUGINS") as caught:
        site.load()
    assert isinstance(caught.value.__cause__, ImportError)


def test_strict_mode_raises_each_time(site: FakeSite) -> None:
    site.plugin("broken-lane", "raise ImportError('no libacme.so')")
    site.environ["WEIGHTLANE_STRICT_PLUGINS"] = "1"
    registry = Registry(environ=site.environ, project=site.folder)
    for _ in range(2):
        with pytest.raises(PluginError, match=r"no libacme.so"):
            registry.load()


def claim_one_name(site: FakeSite) -> None:
    for name in ("bad-lane", "worse-lane"):
        site.plugin(name, site.source(), entry="acme")


def be_of_the_future(site: FakeSite) -> None:
    site.plugin("bad-lane", site.source(api="(9, 0)"))


def lose_metadata(site: FakeSite) -> None:
    site.plugin("bad-lane", site.source())
    (site.folder / "bad_lane-1.0.dist-info" / "METADATA").unlink()


def mistype_a_hook(site: FakeSite) -> None:
    site.plugin("bad-lane", site.source(more="@hookimpl\ndef weightlane_map_name(context): ...\n"))


STRICT = [
    (claim_one_name, r"2 plugins cannot be used: acme of bad-lane 1\.0 is in conflict: .*worse-lane 1\.0"),
    (be_of_the_future, r"1 plugin cannot be used: .*bad-lane 1\.0 is incompatible: .*contract 9\.0"),
    (lose_metadata, r"1 plugin cannot be used: .*bad-lane 1\.0 is broken: .*METADATA names no distribution"),
    (mistype_a_hook, r"1 plugin cannot be used: .*bad-lane 1\.0 is broken: .*mean weightlane_map_names"),
]


@pytest.mark.parametrize(("spoil", "error"), STRICT)
def test_strict_mode_raises_for_whatever_keeps_a_plugin_from_working(
    site: FakeSite, spoil: Callable[[FakeSite], None], error: str
) -> None:
    site.plugin("good-lane", site.source(engine="good"))
    site.environ["WEIGHTLANE_STRICT_PLUGINS"] = "1"
    assert site.status(site.load(), "good-lane").state == "active"
    spoil(site)
    with pytest.raises(PluginError, match=error) as caught:
        site.load()
    assert "good-lane" not in str(caught.value)
    del site.environ["WEIGHTLANE_STRICT_PLUGINS"]
    with pytest.warns(PluginWarning, match="bad-lane"):
        assert site.status(site.load(), "good-lane").state == "active"


def test_strict_mode_names_every_plugin_at_once(site: FakeSite) -> None:
    mistype_a_hook(site)
    site.plugin("broken-lane", "raise ImportError('no libacme.so')")
    site.plugin("new-lane", site.source(api="(9, 0)"))
    site.environ["WEIGHTLANE_STRICT_PLUGINS"] = "1"
    with pytest.raises(PluginError, match=r"3 plugins .*bad-lane.*broken-lane.*no libacme.so.*new-lane"):
        site.load()


def test_strict_mode_does_not_mind_a_disabled_plugin(site: FakeSite) -> None:
    site.plugin("broken-lane", "raise ImportError('no')")
    site.environ.update(WEIGHTLANE_STRICT_PLUGINS="1", WEIGHTLANE_DISABLE_PLUGINS="broken-lane")
    assert site.status(site.load(), "broken-lane").state == "disabled"


def test_strict_mode_is_off_at_zero(site: FakeSite) -> None:
    site.plugin("broken-lane", "raise ImportError('no')")
    site.environ["WEIGHTLANE_STRICT_PLUGINS"] = "0"
    with pytest.warns(PluginWarning):
        site.load()


def test_two_distributions_with_one_entry_name_are_both_in_conflict_and_not_imported(site: FakeSite) -> None:
    modules = [site.plugin(name, site.source(), entry="acme") for name in ("one-lane", "two-lane")]
    with pytest.warns(PluginWarning, match="one-lane 1.0, two-lane 1.0"):
        registry = site.load()
    assert [item.state for item in registry.statuses()] == ["conflict", "conflict"]
    assert not set(modules) & set(sys.modules)


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
@pytest.mark.parametrize("chosen", ["one-lane", "two-lane"])
def test_a_pin_settles_a_conflict(site: FakeSite, chosen: str) -> None:
    for name in ("one-lane", "two-lane"):
        site.plugin(name, site.source(), entry="acme")
    site.environ["WEIGHTLANE_PIN_ACME"] = chosen
    states = {item.distribution: item.state for item in site.load().statuses()}
    assert states.pop(chosen) == "active"
    assert list(states.values()) == ["conflict"]


def test_disabling_one_side_settles_a_conflict(site: FakeSite) -> None:
    for name in ("one-lane", "two-lane"):
        site.plugin(name, site.source(), entry="acme")
    site.environ["WEIGHTLANE_DISABLE_PLUGINS"] = "one-lane"
    registry = site.load()
    assert site.status(registry, "two-lane").state == "active"


@pytest.mark.parametrize(
    ("api", "state"),
    [
        ("CORE_API_VERSION", "active"),
        ("(CORE_API_VERSION[0], CORE_API_VERSION[1] - 1)", "active"),
        ("(CORE_API_VERSION[0], CORE_API_VERSION[1] + 1)", "incompatible"),
        ("(CORE_API_VERSION[0] + 1, 0)", "incompatible"),
        ("(CORE_API_VERSION[0] - 1, 0)", "incompatible"),
        ("(CORE_API_VERSION[0],)", "incompatible"),
    ],
)
@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_a_plugin_for_another_contract_version_is_incompatible(site: FakeSite, api: str, state: str) -> None:
    site.plugin("acme-lane", site.source(api=api))
    registry = site.load()
    assert site.status(registry, "acme-lane").state == state
    assert bool(registry.backends()) == (state == "active")


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_a_newer_plugin_with_hooks_of_its_time_is_incompatible_not_broken(site: FakeSite) -> None:
    more = "@hookimpl\ndef weightlane_teleport(context): ...\n"
    site.plugin("acme-lane", site.source(api="(CORE_API_VERSION[0], CORE_API_VERSION[1] + 1)", more=more))
    status = site.status(site.load(), "acme-lane")
    assert (status.state, "newer weightlane" in status.error) == ("incompatible", True)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (
            "@hookimpl\ndef weightlane_map_name(context): ...",
            "weightlane_map_name,.* mean weightlane_map_names",
        ),
        ("@hookimpl\ndef open_the_door(context): ...", "open_the_door, which is no hook"),
        ("def weightlane_map_names(context): ...", "weightlane_map_names is not marked with @hookimpl"),
        (
            "@hookimpl\ndef weightlane_map_names(context=None): ...",
            "context of weightlane_map_names .* a default",
        ),
        (
            "@hookimpl\ndef weightlane_map_names(*, context): ...",
            "context of weightlane_map_names is keyword",
        ),
        ("@hookimpl\ndef weightlane_map_names(contxt): ...", "contxt"),
    ],
)
def test_an_implementation_that_would_never_run_as_meant_is_broken(
    site: FakeSite, more: str, error: str
) -> None:
    site.plugin("acme-lane", site.source(more=more))
    site.plugin("good-lane", site.source(engine="good"))
    with pytest.warns(PluginWarning, match=error):
        registry = site.load()
    assert site.status(registry, "acme-lane").state == "broken"
    assert [item.distribution for item in registry.backends()] == ["good-lane"]


def test_an_implementation_by_specname_is_refused(site: FakeSite) -> None:
    more = """
    import pluggy

    @pluggy.HookimplMarker("weightlane")(specname="weightlane_map_names")
    def my_names(context):
        return ()
    """
    site.plugin("acme-lane", site.source(more=more))
    with pytest.warns(PluginWarning, match="weightlane_map_names by specname"):
        site.load()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 7", "returned int"),
        ("return ['acme']", "gave a str"),
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("yield None", "gave a NoneType"),
    ],
)
def test_a_plugin_that_registers_nonsense_is_broken(site: FakeSite, body: str, error: str) -> None:
    head = "from weightlane.hookspecs import hookimpl\n"
    site.plugin("acme-lane", f"{head}@hookimpl\ndef weightlane_register_backends():\n    {body}\n")
    with pytest.warns(PluginWarning, match=error):
        registry = site.load()
    assert site.status(registry, "acme-lane").state == "broken"


def test_a_refused_plugin_leaves_nothing_behind(site: FakeSite) -> None:
    """pluggy 1.6 leaves a plugin half-registered when a later implementation of it is refused."""
    more = """
    @hookimpl
    def weightlane_sync_event(event):
        raise AssertionError("called although refused")

    @hookimpl
    def weightlane_worker_agent(no_such_argument): ...
    """
    site.plugin("acme-lane", site.source(more=more))
    with pytest.warns(PluginWarning, match="no_such_argument"):
        registry = site.load()
    manager = registry._manager
    assert not manager.get_plugins()
    assert not [name for name, caller in vars(manager.hook).items() if caller.get_hookimpls()]


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_two_entries_of_one_module_register_it_once(site: FakeSite) -> None:
    source = {"fake_acme_lane": site.source()}
    site.install("acme-lane", {"a": "fake_acme_lane", "b": "fake_acme_lane"}, modules=source)
    registry = site.load()
    assert [item.state for item in registry.statuses()] == ["active", "broken"]
    assert len(registry.backends()) == 1


def test_a_plugin_may_be_an_object(site: FakeSite) -> None:
    source = """
from weightlane.hookspecs import hookimpl

class Observer:
    @hookimpl
    def weightlane_sync_event(self, event): ...

plugin = Observer()
"""
    site.install("acme-lane", {"acme": "fake_acme_lane:plugin"}, modules={"fake_acme_lane": source})
    assert site.status(site.load(), "acme-lane").hooks == ("weightlane_sync_event",)


def test_load_is_idempotent(site: FakeSite) -> None:
    site.plugin("acme-lane", site.source())
    registry = site.load()
    before = registry.statuses()
    assert registry.load() is registry
    assert registry.statuses() == before


def test_a_process_has_one_registry(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme-lane", site.source())
    monkeypatch.chdir(site.folder)
    monkeypatch.setattr(weightlane.registry, "_process_registry", None)
    assert get_registry() is get_registry()
    assert [item.distribution for item in get_registry().backends()] == ["acme-lane"]


def test_registering_the_same_name_twice_in_process_is_an_error(site: FakeSite) -> None:
    registry = Registry(environ={}, project=site.folder)
    registry.register(object(), name="acme")
    with pytest.raises(PluginError, match="registered already"):
        registry.register(object(), name="acme")
