"""Gathering facts: every plugin of the engine is asked, the best source wins."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import pytest

import weightlane.notices
from weightlane.contexts import EndpointContext, FactsContext, RolloutTarget
from weightlane.errors import EngineDeadError, EngineError, HookError, WeightlaneError
from weightlane.facts import EngineFacts, FactsSource
from weightlane.notices import PluginWarning
from weightlane.registry import Registry, get_registry
from weightlane.types import BackendDescriptor

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FakeSite

MakePlugin = Callable[..., ModuleType]
MakeBackend = Callable[..., BackendDescriptor]


@pytest.fixture
def environ() -> dict[str, str]:
    return {}


@pytest.fixture
def registry(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(weightlane.notices, "_shown", set())
    return Registry(environ=environ, project=tmp_path)


def giving(source: FactsSource, version: str) -> Callable[[FactsContext], EngineFacts | None]:
    def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
        return EngineFacts(engine=context.engine, version=version, source=source)

    return weightlane_collect_facts


def failing(error: Exception) -> Callable[[FactsContext], EngineFacts | None]:
    def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
        raise error

    return weightlane_collect_facts


@pytest.mark.parametrize("order", [("worker", "server", "installed"), ("installed", "server", "worker")])
def test_the_best_source_wins_whatever_the_order(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend, order: tuple[FactsSource, ...]
) -> None:
    for source in order:
        plugin = make_plugin(make_backend(), weightlane_collect_facts=giving(source, "1.0"))
        registry.register(plugin, name=f"{source}-plugin")
    assert registry.collect_facts("acme").source == "worker"


def test_only_plugins_of_the_engine_are_asked(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    other = make_backend(name="other", engine="other")
    registry.register(make_plugin(other, weightlane_collect_facts=giving("worker", "9")), name="other")
    registry.register(
        make_plugin(make_backend(), weightlane_collect_facts=giving("server", "1")), name="acme"
    )
    assert registry.collect_facts("acme").version == "1"


def test_a_plugin_of_two_eras_is_asked_once_with_all_distributions(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    asked: list[FactsContext] = []

    def weightlane_collect_facts(context: FactsContext) -> None:
        asked.append(context)

    eras = (make_backend(era="a", distributions=("x", "y")), make_backend(era="b", distributions=("y", "z")))
    registry.register(make_plugin(*eras, weightlane_collect_facts=weightlane_collect_facts), name="acme")
    target = RolloutTarget(engine="acme", address="unix:/nowhere")
    assert registry.collect_facts("acme", target).version == ""
    assert [(sorted(item.distributions), item.target) for item in asked] == [(["x", "y", "z"], target)]


def test_one_failing_plugin_is_warned_of_where_another_answers(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    bad = make_plugin(make_backend(), weightlane_collect_facts=failing(OSError("no route")))
    registry.register(bad, name="bad", distribution="bad-lane")
    good = make_plugin(make_backend(), weightlane_collect_facts=giving("installed", "1.0"))
    registry.register(good, name="good")
    with pytest.warns(PluginWarning, match="bad-lane.*no route"):
        assert registry.collect_facts("acme").version == "1.0"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"version": "1.0"}, "returned a dict"),
        (EngineFacts(engine="b", version="1", source="worker"), "returned b"),
    ],
)
def test_a_plugin_that_gives_no_facts_of_the_engine_is_passed_over_by_name(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend, answer: object, error: str
) -> None:
    bad = make_plugin(make_backend(), weightlane_collect_facts=lambda context: answer)
    registry.register(bad, name="bad", distribution="bad-lane")
    with pytest.raises(HookError, match=f"bad-lane {error} when it was asked for facts of acme"):
        registry.collect_facts("acme")
    good = make_plugin(make_backend(), weightlane_collect_facts=giving("installed", "1.0"))
    registry.register(good, name="good")
    with pytest.warns(PluginWarning, match="bad-lane"):
        assert registry.collect_facts("acme").version == "1.0"


def test_where_nobody_answers_the_failure_is_raised(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    bad = make_plugin(make_backend(), weightlane_collect_facts=failing(OSError("no route")))
    registry.register(bad, name="bad", distribution="bad-lane")
    with pytest.raises(HookError, match=r"bad-lane.*no route"):
        registry.collect_facts("acme")


def test_a_dead_engine_stays_a_dead_engine(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    bad = make_plugin(make_backend(), weightlane_collect_facts=failing(EngineDeadError("Gone.")))
    registry.register(bad, name="bad")
    with pytest.raises(EngineDeadError):
        registry.collect_facts("acme")


def test_an_installed_engine_is_known_by_its_metadata_alone(
    site: FakeSite, registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    site.engine("acme-engine", "0.11.0rc2")
    registry.register(make_plugin(make_backend(distributions=("acme-gpu", "acme-engine"))), name="acme")
    facts = registry.collect_facts("acme")
    assert (facts.version, facts.source) == ("0.11.0rc2", "installed")


def test_what_is_installed_here_says_nothing_of_a_target(
    site: FakeSite, registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    site.engine("acme-engine", "0.11.0")
    registry.register(make_plugin(make_backend()), name="acme")
    facts = registry.collect_facts("acme", RolloutTarget(engine="acme", address="https://x.invalid"))
    assert (facts.version, facts.source) == ("", "assumed")


def test_of_an_address_that_no_plugin_takes_the_reason_is_told_not_that_no_version_fits(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    def refuses(context: EndpointContext) -> NoReturn:
        raise EngineError(f"{context.target.address} is none of mine.", "acme listens on pipes.", "Name one.")

    registry.register(make_plugin(make_backend(), weightlane_open_endpoint=refuses), name="acme")
    with pytest.raises(EngineError, match="none of mine"):
        registry.collect_facts("acme", RolloutTarget(engine="acme", address="ftp://x"))
    assert registry.collect_facts("acme").version == "", "without an address nobody is asked"


def test_an_address_that_one_of_two_plugins_opens_is_closed_again_and_taken(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    closed: list[str] = []

    def refuses(context: EndpointContext) -> NoReturn:
        raise EngineError("Not mine.", "No.", "No.")

    def opens(context: EndpointContext) -> object:
        return SimpleNamespace(close=lambda: closed.append(context.target.address))

    for name, hook in (("first", refuses), ("second", opens)):
        registry.register(make_plugin(make_backend(), weightlane_open_endpoint=hook), name=name)
    assert registry.collect_facts("acme", RolloutTarget(engine="acme", address="pipe:x")).version == ""
    assert closed == ["pipe:x"]


@pytest.mark.parametrize(
    ("engine", "address", "fix"),
    [
        ("sglang", "unix:/tmp/x", "http://127.0.0.1:30000"),
        ("sglang", "127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("vllm", "http://127.0.0.1:8000", "python -m weightlane_vllm.server"),
        ("vllm", "127.0.0.1:8000", "Use unix:/absolute/path"),
        ("reference", "http://127.0.0.1:8000", "Use unix:/absolute/path"),
    ],
)
def test_each_engine_says_how_it_is_reached(engine: str, address: str, fix: str) -> None:
    with pytest.raises(WeightlaneError) as caught:
        get_registry().collect_facts(engine, RolloutTarget(engine=engine, address=address))
    assert fix in str(caught.value)


def test_an_engine_nobody_knows_has_no_facts(registry: Registry) -> None:
    assert registry.collect_facts("nothing").version == ""


def test_a_version_that_the_user_assumes_replaces_the_one_found(
    registry: Registry, environ: dict[str, str], make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    environ["WEIGHTLANE_ASSUME_ACME_VERSION"] = "1.5"
    plugin = make_plugin(make_backend(), weightlane_collect_facts=giving("server", "0.0.0+odd"))
    registry.register(plugin, name="acme")
    facts = registry.collect_facts("acme")
    assert (facts.version, facts.source) == ("1.5", "server")
