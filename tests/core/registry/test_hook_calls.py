"""Calling hooks: the chosen plugin alone, with its name on every error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pluggy
import pytest

import weightlane.notices
from weightlane.errors import EngineDeadError, HookError, PluginError, SelectionError
from weightlane.events import SyncEvent
from weightlane.notices import PluginWarning
from weightlane.registry import Registry, Selected
from weightlane.types import BackendDescriptor

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

MakePlugin = Callable[..., ModuleType]
MakeBackend = Callable[..., BackendDescriptor]

CONTEXT: Any = "a context"
STREAM_CONTEXT: Any = SimpleNamespace(manifest=SimpleNamespace(trained=None))


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(weightlane.notices, "_shown", set())
    return Registry(environ={}, project=tmp_path)


def add(registry: Registry, plugin: Any, name: str, version: str = "1.2") -> Selected:
    status = registry.register(plugin, name=name, distribution=f"{name}-lane", version=version)
    assert status.state == "active", status.error
    (selected,) = (item for item in registry.backends() if item.distribution == f"{name}-lane")
    return selected


@pytest.mark.parametrize("chosen", ["one", "two", "three"])
def test_only_the_chosen_plugin_is_called(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend, chosen: str
) -> None:
    called: list[str] = []

    def answer(name: str) -> Callable[[Any], Any]:
        def weightlane_map_names(context: Any) -> Any:
            called.append(name)
            return (name, context)

        return weightlane_map_names

    backends = {
        name: add(registry, make_plugin(make_backend(), weightlane_map_names=answer(name)), name)
        for name in ("one", "two", "three")
    }
    assert registry.call_map_names(backends[chosen], CONTEXT) == (chosen, CONTEXT)
    assert called == [chosen]


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("call_plan_launch", "weightlane_plan_launch"),
        ("call_open_endpoint", "weightlane_open_endpoint"),
        ("call_build_requests", "weightlane_build_requests"),
        ("call_plan_lifecycle", "weightlane_plan_lifecycle"),
        ("call_describe_export", "weightlane_describe_export"),
        ("call_worker_agent", "weightlane_worker_agent"),
    ],
)
def test_each_method_calls_its_hook(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend, method: str, hook: str
) -> None:
    hooks = {hook: lambda context: ("from", hook, context)}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    assert getattr(registry, method)(selected, 7) == ("from", hook, 7)


def test_a_wrapper_of_another_plugin_runs_around_the_chosen_one(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    seen: list[str] = []
    wrapper = ModuleType("wrapper")

    def weightlane_map_names(context: Any) -> Iterator[Any]:
        seen.append("before")
        result = yield
        seen.append("after")
        return result

    wrapper.weightlane_map_names = pluggy.HookimplMarker("weightlane")(wrapper=True)(weightlane_map_names)
    registry.register(wrapper, name="tracing")
    hooks = {"weightlane_map_names": lambda context: seen.append("call") or ()}
    chosen = add(registry, make_plugin(make_backend(), **hooks), "acme")
    add(registry, make_plugin(make_backend(), weightlane_map_names=lambda context: 1 / 0), "rival")
    assert registry.call_map_names(chosen, CONTEXT) == ()
    assert seen == ["before", "call", "after"]


def test_an_error_names_plugin_distribution_version_and_hook(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    def weightlane_build_requests(context: Any) -> Any:
        raise KeyError("flush_cache")

    hooks = {"weightlane_build_requests": weightlane_build_requests}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    with pytest.raises(HookError) as caught:
        registry.call_build_requests(selected, CONTEXT)
    for word in ("acme-lane 1.2", "acme-lane:acme", "weightlane_build_requests", "KeyError", "flush_cache"):
        assert word in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_a_wrapper_names_the_wrapper_and_not_the_chosen_plugin(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    broken = ModuleType("wrapper")
    is_broken = True

    def weightlane_map_names(context: Any) -> Iterator[Any]:
        result = yield
        if is_broken:
            raise RuntimeError("the tracer is full")
        return result

    broken.weightlane_map_names = pluggy.HookimplMarker("weightlane")(wrapper=True)(weightlane_map_names)
    registry.register(broken, name="tracing", distribution="tracing-tool", version="3.1")
    chosen = add(registry, make_plugin(make_backend(), weightlane_map_names=lambda context: ()), "acme")
    bad = add(registry, make_plugin(make_backend(), weightlane_map_names=lambda context: 1 / 0), "bad")
    with pytest.raises(HookError, match=r"plugin tracing-tool:tracing of tracing-tool 3\.1.*tracer is full"):
        registry.call_map_names(chosen, CONTEXT)
    is_broken = False
    with pytest.raises(HookError, match=r"plugin bad-lane:bad of bad-lane 1\.2 failed: ZeroDivisionError"):
        registry.call_map_names(bad, CONTEXT)  # its error passes through the wrapper


def test_an_error_of_a_generator_names_the_plugin_too(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    def weightlane_map_names(context: Any) -> Iterator[int]:
        yield 1
        raise ValueError("the second name")

    hooks = {"weightlane_map_names": weightlane_map_names}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    with pytest.raises(HookError, match=r"acme-lane 1\.2.*the second name"):
        registry.call_map_names(selected, CONTEXT)


def test_a_typed_error_keeps_its_type(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    def weightlane_open_endpoint(context: Any) -> Any:
        raise EngineDeadError("The engine is gone.")

    hooks = {"weightlane_open_endpoint": weightlane_open_endpoint}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    with pytest.raises(EngineDeadError) as caught:
        registry.call_open_endpoint(selected, CONTEXT)
    if sys.version_info >= (3, 11):
        assert "acme-lane 1.2" in caught.value.__notes__[0]


def test_a_hook_that_the_plugin_lacks_is_a_typed_error(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    selected = add(registry, make_plugin(make_backend()), "acme")
    add(registry, make_plugin(make_backend(), weightlane_plan_launch=lambda context: "wrong"), "rival")
    assert not registry.implements(selected, "weightlane_plan_launch")
    with pytest.raises(HookError, match=r"weightlane_plan_launch of .*acme-lane 1\.2 is not implemented"):
        registry.call_plan_launch(selected, CONTEXT)


def test_none_from_the_chosen_plugin_is_a_typed_error(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    selected = add(registry, make_plugin(make_backend(), weightlane_plan_launch=lambda context: None), "acme")
    with pytest.raises(HookError, match="returned nothing"):
        registry.call_plan_launch(selected, CONTEXT)


def test_a_backend_of_another_registry_is_refused(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend, tmp_path: Path
) -> None:
    selected = add(registry, make_plugin(make_backend(), weightlane_plan_launch=lambda context: 1), "acme")
    with pytest.raises(PluginError, match="no plugin of this registry"):
        Registry(environ={}, project=tmp_path).call_plan_launch(selected, CONTEXT)


class FakeStream:
    """An export stream that fails at its second bucket and notes how it was left."""

    collective = False
    owns_storage = True
    device = "cpu"

    def __init__(self) -> None:
        self.exits: list[object] = []

    def __iter__(self) -> Iterator[Any]:
        yield [(0, "tensor")]
        raise RuntimeError("out of storage")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self.exits.append(exc_type)


def test_an_error_in_a_later_bucket_names_the_plugin_and_the_stream_is_left_once(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    stream = FakeStream()
    hooks = {"weightlane_export_params": lambda context: stream}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    got: list[Any] = []

    def drain() -> None:
        with registry.call_export_params(selected, STREAM_CONTEXT) as guarded:
            assert (guarded.collective, guarded.owns_storage, guarded.device) == (False, True, "cpu")
            got.extend(guarded)

    with pytest.raises(HookError, match=r"acme-lane 1\.2.*out of storage"):
        drain()
    assert got == [[(0, "tensor")]]
    assert stream.exits == [HookError]


def test_a_bucket_that_is_made_lazily_is_refused_with_the_plugins_name(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    class FakeLazyStream(FakeStream):
        def __iter__(self) -> Iterator[Any]:
            yield ((number, 1 / 0) for number in range(2))

    hooks = {"weightlane_export_params": lambda context: FakeLazyStream()}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    with pytest.raises(HookError, match=r"acme-lane 1\.2 yielded a generator as a bucket"):
        list(registry.call_export_params(selected, STREAM_CONTEXT))


def test_a_stream_that_ends_ends(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    class FakeShortStream(FakeStream):
        def __iter__(self) -> Iterator[Any]:
            yield []

    hooks = {"weightlane_export_params": lambda context: FakeShortStream()}
    selected = add(registry, make_plugin(make_backend(), **hooks), "acme")
    assert list(registry.call_export_params(selected, STREAM_CONTEXT)) == [[]]


def test_an_observer_that_fails_is_warned_of_once_and_others_still_hear(
    registry: Registry, make_plugin: MakePlugin
) -> None:
    heard: list[SyncEvent] = []
    event = SyncEvent(kind="published", lane="a", rank=0)

    def listens(event: SyncEvent) -> None:
        heard.append(event)

    def fails(event: SyncEvent) -> None:
        raise OSError("disk full")

    registry.register(make_plugin(weightlane_sync_event=listens), name="first")
    registry.register(make_plugin(weightlane_sync_event=fails), name="bad")
    registry.register(make_plugin(weightlane_sync_event=listens), name="last")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        registry.emit(event)
        registry.emit(event)
    (warning,) = shown
    assert warning.category is PluginWarning
    assert "in-process:bad of in-process failed in weightlane_sync_event: OSError: disk full" in str(
        warning.message
    )
    assert heard == [event] * 4


def test_emit_without_observers_does_nothing(registry: Registry) -> None:
    registry.emit(SyncEvent(kind="closed", lane="a", rank=0))


def test_a_backend_is_found_by_name_and_by_reference(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    selected = add(registry, make_plugin(make_backend()), "acme")
    assert selected.reference == "acme-lane/acme@only"
    assert registry.backend_named("acme") == selected
    assert registry.backend_named(selected.reference) == selected
    assert registry.backend_named("acmee") is None


def test_a_name_of_two_eras_needs_a_reference(
    registry: Registry, make_plugin: MakePlugin, make_backend: MakeBackend
) -> None:
    plugin = make_plugin(make_backend(era="old"), make_backend(era="new", versions=">=2"))
    registry.register(plugin, name="acme", distribution="acme-lane", version="1")
    with pytest.raises(SelectionError, match="acme-lane/acme@new"):
        registry.backend_named("acme")
    found = registry.backend_named("acme-lane/acme@new")
    assert found is not None
    assert found.descriptor.era == "new"


def test_naming_a_broken_plugin_raises_its_cause(registry: Registry, make_plugin: MakePlugin) -> None:
    def weightlane_register_backends() -> Any:
        raise ImportError("no libacme.so")

    plugin = make_plugin()
    plugin.weightlane_register_backends = pluggy.HookimplMarker("weightlane")(weightlane_register_backends)
    assert registry.register(plugin, name="acme", distribution="acme-lane").state == "broken"
    with pytest.raises(PluginError, match=r"no libacme.so") as caught:
        registry.backend_named("acme")
    assert isinstance(caught.value.__cause__, ImportError)
