"""Selection: which backend is taken, on which evidence, and what is said when none is."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import weightlane.notices
from weightlane.errors import PinError, PluginError, SelectionError
from weightlane.facts import EngineFacts
from weightlane.notices import PluginWarning
from weightlane.probes import NotViable, ProbeResult, Viable, require_attributes
from weightlane.registry import Registry
from weightlane.selection import choose, select
from weightlane.types import BackendDescriptor

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FakeSite

MakePlugin = Callable[..., ModuleType]
MakeBackend = Callable[..., BackendDescriptor]


def passes(facts: EngineFacts) -> ProbeResult:
    return Viable(("`load_weights` is defined",))


def fails(facts: EngineFacts) -> ProbeResult:
    return NotViable("`load_weights` is not defined")


def facts(version: str, **attributes: bool) -> EngineFacts:
    return EngineFacts(engine="acme", version=version, source="installed", attributes=attributes)


class Bench:
    """A registry in the making."""

    def __init__(self, folder: Path, make_plugin: MakePlugin, make_backend: MakeBackend) -> None:
        self.environ: dict[str, str] = {}
        self.folder = folder
        self._make_plugin = make_plugin
        self._make_backend = make_backend
        self._plugins: list[tuple[str, str, ModuleType]] = []

    def plugin(self, distribution: str, *eras: dict[str, Any], version: str = "1.0") -> None:
        backends = [self._make_backend(**fields) for fields in (eras or ({},))]
        self._plugins.append((distribution, version, self._make_plugin(*backends)))

    def registry(self) -> Registry:
        registry = Registry(environ=self.environ, project=self.folder)
        for distribution, version, plugin in self._plugins:
            registry.register(plugin, name=distribution, distribution=distribution, version=version)
        return registry

    def select(self, version: str, **arguments: Any) -> Any:
        return select(self.registry(), "rollout", "acme", facts(version), **arguments)


@pytest.fixture
def bench(
    tmp_path: Path, make_plugin: MakePlugin, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> Bench:
    monkeypatch.setattr(weightlane.notices, "_shown", set())
    return Bench(tmp_path, make_plugin, make_backend)


# -- version range and probe ------------------------------------------------------------------------------


@pytest.mark.requirement("R87")
@pytest.mark.parametrize("version", ["1.0", "1.9.9", "1.0.post1", "1.5rc1", "1.2.dev3", "1.4+cu128", "2.0a1"])
def test_a_version_in_range_is_taken_with_evidence(bench: Bench, version: str) -> None:
    bench.plugin("acme-lane", {"versions": ">=1,<2.0b1"})
    selected = bench.select(version)
    assert (selected.distribution, selected.version, selected.notes) == ("acme-lane", "1.0", ())
    assert f"acme {version} (as installed here) fits acme" in selected.evidence[0]


def test_the_range_alone_decides_where_nothing_is_probed(bench: Bench) -> None:
    bench.plugin("acme-lane")
    with pytest.raises(SelectionError, match=r"it serves acme <2,>=1 and found acme 2\.1"):
        bench.select("2.1")


@pytest.mark.requirement("R87")
def test_a_failing_probe_beats_a_version_in_range_and_says_so(bench: Bench) -> None:
    bench.plugin("acme-lane", {"probe": fails})
    with pytest.raises(SelectionError, match=r"`load_weights` is not defined \(although acme 1\.5 .* fits"):
        bench.select("1.5")


@pytest.mark.requirement("R87")
def test_a_passing_probe_beats_an_older_version_and_says_so(bench: Bench) -> None:
    bench.plugin("acme-lane", {"probe": passes})
    (note,) = bench.select("0.9").notes
    assert "older than the versions this backend was written for" in note
    assert "`load_weights` is defined" in note


def test_an_engine_newer_than_every_range_runs_with_a_warning_when_its_probe_passes(bench: Bench) -> None:
    bench.plugin("acme-lane", {"probe": passes})
    with pytest.warns(PluginWarning, match="acme 7.0 .*newer than"):
        selected = bench.select("7.0")
    assert "newer than the versions this backend was written for" in selected.notes[0]


def test_an_engine_newer_than_every_range_is_refused_when_its_probe_fails(bench: Bench) -> None:
    bench.plugin("acme-lane", {"probe": fails})
    with pytest.raises(SelectionError, match="`load_weights` is not defined; and it serves"):
        bench.select("7.0")


def test_a_version_that_the_range_excludes_by_name_is_refused_although_the_probe_passes(bench: Bench) -> None:
    bench.plugin("acme-lane", {"versions": ">=1,<2,!=1.3", "probe": passes})
    assert bench.select("1.4").distribution == "acme-lane"
    with pytest.raises(SelectionError, match="a version that it excludes"):
        bench.select("1.3")


@pytest.mark.parametrize("version", ["", "built-on-tuesday"])
def test_a_version_that_cannot_be_compared_leaves_it_to_the_probe(bench: Bench, version: str) -> None:
    bench.plugin("acme-lane", {"probe": passes})
    (note,) = bench.select(version).notes
    assert "WEIGHTLANE_ASSUME_ACME_VERSION" in note


def test_an_assumed_version_is_used_and_noted(bench: Bench) -> None:
    bench.plugin("acme-lane")
    bench.environ["WEIGHTLANE_ASSUME_ACME_VERSION"] = "1.5"
    selected = bench.select("built-on-tuesday")
    assert "version 1.5 of acme is assumed, as WEIGHTLANE_ASSUME_ACME_VERSION says" in selected.notes
    bench.environ["WEIGHTLANE_ASSUME_ACME_VERSION"] = "2.5"
    with pytest.raises(SelectionError):
        bench.select("1.5")


def test_evidence_says_that_an_assumed_version_was_not_found(bench: Bench) -> None:
    bench.plugin("acme-lane")
    assert bench.select("1.5").evidence[0] == "acme 1.5 (as installed here) fits acme <2,>=1"
    bench.environ["WEIGHTLANE_ASSUME_ACME_VERSION"] = "1.6"
    (first, *_) = bench.select("1.5").evidence
    assert first == "acme 1.6 (as WEIGHTLANE_ASSUME_ACME_VERSION says) fits acme <2,>=1"


def test_evidence_that_is_one_string_is_refused(bench: Bench) -> None:
    bench.plugin("bad-lane", {"probe": lambda facts: Viable("seen")})  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="its probe gave a str as its evidence"):
        bench.select("1.5")


def test_where_no_engine_is_installed_the_error_says_so(bench: Bench) -> None:
    bench.plugin("acme-lane", {"install_hint": "pip install acme-engine"})
    nothing = EngineFacts(engine="acme", version="", source="assumed")
    with pytest.raises(SelectionError, match="it is not installed here and no engine told") as caught:
        select(bench.registry(), "rollout", "acme", nothing)
    assert caught.value.fix.startswith("Run pip install acme-engine")


def test_a_trainer_that_is_not_installed_is_refused_although_its_probe_asks_for_nothing(bench: Bench) -> None:
    bench.plugin("acme-lane", {"role": "trainer", "probe": passes})
    nothing = EngineFacts(engine="acme", version="", source="assumed")
    with pytest.raises(SelectionError, match="acme is not installed here"):
        select(bench.registry(), "trainer", "acme", nothing)
    bench.environ["WEIGHTLANE_ASSUME_ACME_VERSION"] = "1.5"
    assert select(bench.registry(), "trainer", "acme", nothing).distribution == "acme-lane"


def test_a_probe_that_raises_is_a_reason_not_a_crash(bench: Bench) -> None:
    def raises(facts: EngineFacts) -> ProbeResult:
        raise ZeroDivisionError("oh")

    bench.plugin("bad-lane", {"probe": raises})
    with pytest.raises(SelectionError, match="its probe failed: ZeroDivisionError: oh") as caught:
        bench.select("1.5")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    bench.plugin("good-lane")
    assert bench.select("1.5").distribution == "good-lane"


def test_a_probe_that_answers_nonsense_is_refused(bench: Bench) -> None:
    bench.plugin("bad-lane", {"probe": lambda facts: True})
    with pytest.raises(SelectionError, match="its probe returned True"):
        bench.select("1.5")


# -- eras of one plugin -----------------------------------------------------------------------------------

OLD = {"era": "old", "versions": ">=1,<2"}
NEW = {"era": "new", "versions": ">=2,<3"}


@pytest.mark.parametrize(("version", "era"), [("1.9", "old"), ("2.0", "new"), ("2.9", "new")])
def test_the_era_is_chosen_by_version(bench: Bench, version: str, era: str) -> None:
    bench.plugin("acme-lane", OLD, NEW)
    assert bench.select(version).descriptor.era == era


@pytest.mark.requirement("R87")
@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
@pytest.mark.parametrize(("version", "era"), [("0.5", "old"), ("2.0.dev1", "new"), ("9", "new")])
def test_outside_all_ranges_the_nearest_era_whose_probe_passes_is_taken(
    bench: Bench, version: str, era: str
) -> None:
    bench.plugin("acme-lane", {**OLD, "probe": passes}, {**NEW, "probe": passes})
    assert bench.select(version).descriptor.era == era


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_of_two_eras_only_the_one_whose_probe_passes_is_taken(bench: Bench) -> None:
    bench.plugin("acme-lane", {**OLD, "probe": passes}, {**NEW, "probe": fails})
    selected = bench.select("2.5")
    assert selected.descriptor.era == "old"
    assert "newer than" in selected.notes[0]


def test_eras_that_overlap_are_an_error_naming_both(bench: Bench) -> None:
    bench.plugin("acme-lane", OLD, {**NEW, "versions": ">=1.5"})
    with pytest.raises(SelectionError, match=r"acme \(new\) .*acme \(old\) .*two of its eras overlap"):
        bench.select("1.7")


def test_an_era_for_a_newer_contract_is_passed_over(bench: Bench) -> None:
    bench.plugin("acme-lane", {**OLD}, {**NEW, "api_version": (9, 0)})
    assert bench.select("1.5").descriptor.era == "old"
    with pytest.raises(SelectionError, match=r"weightlane contract 9\.0"):
        bench.select("2.5")


# -- several plugins --------------------------------------------------------------------------------------


def test_the_larger_priority_wins_whatever_the_order(bench: Bench) -> None:
    for distribution, priority in (("low", 1), ("high", 5), ("middle", 3)):
        bench.plugin(distribution, {"priority": priority})
    assert bench.select("1.5").distribution == "high"


def test_a_tie_is_an_error_naming_both_distributions_and_how_to_pin_one(bench: Bench) -> None:
    bench.plugin("one-lane", version="1.1")
    bench.plugin("two-lane", version="2.2")
    with pytest.raises(SelectionError) as caught:
        bench.select("1.5")
    for word in ("one-lane 1.1", "two-lane 2.2", "WEIGHTLANE_PIN_ACME=one-lane"):
        assert word in str(caught.value)


def test_a_range_that_holds_the_version_goes_before_a_larger_priority_outside_its_range(bench: Bench) -> None:
    bench.plugin("bold-lane", {"versions": ">=5", "probe": passes, "priority": 9})
    bench.plugin("fitting-lane", {"probe": passes})
    assert bench.select("1.5").distribution == "fitting-lane"


@pytest.mark.requirement("R87")
def test_probes_decide_between_plugins(bench: Bench) -> None:
    bench.plugin("one-lane", {"probe": lambda found: require_attributes(found, ("Layer.load_weights",))})
    bench.plugin("two-lane", {"probe": lambda found: require_attributes(found, ("Layer.load",))})
    seen = facts("1.5", **{"Layer.load_weights": False, "Layer.load": True})
    choice = choose(bench.registry(), "rollout", "acme", seen)
    assert choice.selected.distribution == "two-lane"
    reasons = {item.backend.distribution: item.reason for item in choice.verdicts}
    assert "does not define Layer.load_weights" in reasons["one-lane"]


def test_the_role_is_part_of_the_question(bench: Bench) -> None:
    bench.plugin("acme-lane")
    with pytest.raises(SelectionError, match="acme is registered as a rollout only"):
        select(bench.registry(), "trainer", "acme", facts("1.5"))


# -- nothing fits -----------------------------------------------------------------------------------------


def test_an_unknown_engine_names_near_ones_and_what_to_install(bench: Bench) -> None:
    bench.plugin("acme-lane")
    with pytest.raises(
        SelectionError, match=r"Registered rollout engines: acme.*Near: vllm.*pip install"
    ) as caught:
        select(
            bench.registry(), "rollout", "vlllm", EngineFacts(engine="vlllm", version="", source="assumed")
        )
    assert "weightlane-vllm" in caught.value.fix


def test_an_engine_without_its_plugin_names_the_command_that_installs_it(bench: Bench) -> None:
    with pytest.raises(
        SelectionError, match=r"No rollout backend fits sglang.*pip install 'weightlane-sglang'"
    ):
        select(
            bench.registry(), "rollout", "sglang", EngineFacts(engine="sglang", version="", source="assumed")
        )


def test_every_candidate_is_listed_with_its_reason(bench: Bench) -> None:
    bench.plugin("one-lane", {"probe": fails})
    bench.plugin("two-lane", {"versions": "<1"})
    bench.plugin("three-lane", {"api_version": (9, 0)}, version="3.3")
    with pytest.raises(SelectionError) as caught:
        bench.select("1.5")
    for word in (
        "one-lane 1.0: its probe says",
        "two-lane 1.0: it serves acme <1",
        "three-lane 3.3: acme was written",
    ):
        assert word in str(caught.value)


# -- pins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", ["one-lane", "One_Lane", "one-lane==1.2.*", "one-lane[one-lane]>=1"])
def test_a_pin_by_argument_beats_priority(bench: Bench, pin: str) -> None:
    bench.plugin("one-lane", version="1.2.3")
    bench.plugin("two-lane", {"priority": 9})
    assert bench.select("1.5").distribution == "two-lane"
    selected = bench.select("1.5", pin=pin)
    assert selected.distribution == "one-lane"
    assert selected.evidence[-1].startswith(f"pinned to {pin} by argument")


def test_a_pin_breaks_a_tie(bench: Bench) -> None:
    bench.plugin("one-lane")
    bench.plugin("two-lane")
    bench.environ["WEIGHTLANE_PIN_ACME"] = "two-lane"
    assert bench.select("1.5").distribution == "two-lane"


def test_a_pin_of_the_project_is_honoured_and_an_argument_goes_before_it(bench: Bench) -> None:
    bench.plugin("one-lane")
    bench.plugin("two-lane", {"priority": 9})
    (bench.folder / "pyproject.toml").write_text('[tool.weightlane.pins]\nacme = "one-lane"\n')
    assert bench.select("1.5").distribution == "one-lane"
    bench.environ["WEIGHTLANE_PIN_ACME"] = "two-lane"
    assert bench.select("1.5").distribution == "two-lane"
    assert bench.select("1.5", pin="one-lane").distribution == "one-lane"


def test_a_pin_of_another_engine_says_nothing(bench: Bench) -> None:
    bench.plugin("acme-lane")
    bench.environ["WEIGHTLANE_PIN_OTHER"] = "other-lane"
    assert bench.select("1.5").distribution == "acme-lane"


@pytest.mark.parametrize(
    ("pin", "error"),
    [
        ("absent-lane", "absent-lane is not installed"),
        ("one-lame", "one-lame is not installed.*there is one-lane"),
        ("one-lane==2.*", r"one-lane 1\.0 is installed"),
        ("one-lane[other]", "one-lane has no entry point other"),
        ("old-lane", r"old-lane 1\.0: it serves acme <1 and found acme 1\.5"),
        ("else-lane", "else-lane registers no rollout backend for acme"),
        ("one lane", "cannot be read"),
    ],
)
def test_a_pin_that_cannot_be_met_is_an_error_although_another_backend_fits(
    bench: Bench, pin: str, error: str
) -> None:
    bench.plugin("one-lane")
    bench.plugin("old-lane", {"versions": "<1"})
    bench.plugin("else-lane", {"engine": "other", "name": "other"})
    assert bench.select("1.5").distribution == "one-lane"
    with pytest.raises(PinError, match=error):
        bench.select("1.5", pin=pin)


# -- plugins that cannot be used --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_choosing_an_engine_whose_plugin_is_broken_raises_its_own_cause(site: FakeSite) -> None:
    site.plugin("acme-lane", "raise ImportError('no libacme.so')", entry="acme")
    with pytest.raises(PluginError, match=r"acme of acme-lane 1.0 is broken: .*no libacme.so") as caught:
        select(site.load(), "rollout", "acme", facts("1.5"))
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_pinning_a_broken_plugin_raises_its_own_cause(site: FakeSite) -> None:
    site.plugin("bad-lane", "raise ImportError('no libacme.so')")
    site.plugin("good-lane", site.source())
    with pytest.raises(PluginError, match=r"no libacme.so") as caught:
        select(site.load(), "rollout", "acme", facts("1.5"), pin="bad-lane")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_a_broken_rival_is_noted_and_stops_nothing(site: FakeSite) -> None:
    site.plugin("bad-lane", "raise ImportError('no libacme.so')", entry="acme")
    site.plugin("good-lane", site.source())
    selected = select(site.load(), "rollout", "acme", facts("1.5"))
    assert selected.distribution == "good-lane"
    assert any("bad-lane" in note and "no libacme.so" in note for note in selected.notes)


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_a_pin_of_a_distribution_whose_other_plugin_is_broken_names_that_too(site: FakeSite) -> None:
    modules = {"fake_good": site.source(engine="other"), "fake_bad": "raise ImportError('no libacme.so')"}
    site.install("acme-lane", {"acme": "fake_bad", "other": "fake_good"}, modules=modules)
    with pytest.raises(PinError, match=r"registers no rollout backend for acme. .*no libacme.so") as caught:
        select(site.load(), "rollout", "acme", facts("1.5"), pin="acme-lane")
    assert isinstance(caught.value.__cause__, ImportError)


def test_pinning_a_disabled_plugin_is_an_error_that_says_so(site: FakeSite) -> None:
    site.plugin("off-lane", site.source())
    site.plugin("on-lane", site.source())
    site.environ["WEIGHTLANE_DISABLE_PLUGINS"] = "off-lane"
    with pytest.raises(PinError, match=r"off-lane 1.0 is disabled: WEIGHTLANE_DISABLE_PLUGINS"):
        select(site.load(), "rollout", "acme", facts("1.5"), pin="off-lane")


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_pinning_an_incompatible_plugin_is_an_error_that_says_so(site: FakeSite) -> None:
    site.plugin("new-lane", site.source(api="(9, 0)"))
    site.plugin("on-lane", site.source())
    with pytest.raises(PinError, match=r"new-lane 1.0 is incompatible: .*contract 9.0"):
        select(site.load(), "rollout", "acme", facts("1.5"), pin="new-lane")


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_an_engine_in_conflict_is_an_error_until_an_argument_pins_one(site: FakeSite) -> None:
    for name in ("one-lane", "two-lane"):
        site.plugin(name, site.source(), entry="acme")
    registry = site.load()
    with pytest.raises(PluginError, match=r"one-lane 1.0, two-lane 1.0"):
        select(registry, "rollout", "acme", facts("1.5"))
    assert select(registry, "rollout", "acme", facts("1.5"), pin="two-lane").distribution == "two-lane"
    assert site.status(registry, "one-lane").state == "conflict"
