"""One typed method per hook. Each calls the chosen backend's plugin and wrappers, and no rival."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weightlane.errors import PluginError
from weightlane.facts import EngineFacts
from weightlane.hook_errors import GuardedStream, HookSite, blamed_on
from weightlane.normal_stream import NormalFormStream, as_trained
from weightlane.notices import warn_once
from weightlane.program import TrainerLifecycle
from weightlane.trace.table import Untraced

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

    import pluggy

    from weightlane.adapters import AdapterExpression
    from weightlane.contexts import (
        AgentContext,
        BuildRequestsContext,
        EndpointContext,
        ExportContext,
        ExpressAdapterContext,
        FactsContext,
        LaunchContext,
        LaunchPlan,
        MapNamesContext,
        PeftConfigContext,
        StreamContext,
        TraceModelContext,
        TrainerLifecycleContext,
    )
    from weightlane.endpoint import EngineEndpoint
    from weightlane.engine_agent import WorkerEngine
    from weightlane.events import SyncEvent
    from weightlane.manifest import RankManifest
    from weightlane.peft import AdapterConfig
    from weightlane.program import Lifecycle, Program
    from weightlane.receiver import NameEntry
    from weightlane.stream import ExportStream
    from weightlane.trace.table import PlacementTable
    from weightlane.types import BackendDescriptor


@dataclass(frozen=True, slots=True)
class Selected:
    """One backend and the plugin that is called for it.

    `version` is the distribution's, `evidence` what spoke for the backend, `notes` what a user should know
    about the choice: a version outside its range, an assumed version, a rival that is broken.
    """

    descriptor: BackendDescriptor
    plugin_name: str
    distribution: str
    version: str
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Backend, era, distribution and version, for messages."""
        return (
            f"{self.descriptor.name} ({self.descriptor.era}) of {self.distribution} {self.version}".rstrip()
        )

    @property
    def reference(self) -> str:
        """Names exactly this backend to another process; `Registry.backend_named` reads it."""
        return f"{self.distribution}/{self.descriptor.name}@{self.descriptor.era}"


class HookCalls:
    """The hooks of the plugins in one manager."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager

    def implements(self, selected: Selected, hook: str) -> bool:
        """Whether the chosen backend's plugin implements a hook."""
        plugin = self._manager.get_plugin(selected.plugin_name)
        return any(impl.plugin is plugin and not is_wrapper(impl) for impl in self._implementations(hook))

    def package_of(self, selected: Selected) -> str:
        """The import package that the chosen backend's plugin comes from."""
        plugin = self._manager.get_plugin(selected.plugin_name)
        module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
        return module.partition(".")[0]

    def call_collect_facts(self, selected: Selected, context: FactsContext) -> EngineFacts | None:
        """`weightlane_collect_facts` of this plugin; None when it has no such hook or cannot tell."""
        hook = "weightlane_collect_facts"
        if not self.implements(selected, hook):
            return None
        plugin = self._manager.get_plugin(selected.plugin_name)
        site = _site(selected, hook)
        answers: list[object] = self._ask(plugin, hook, site, context)
        if not answers:
            return None
        facts = answers[0]
        if not isinstance(facts, EngineFacts) or facts.engine != context.engine:
            told = facts.engine if isinstance(facts, EngineFacts) else f"a {type(facts).__name__}"
            raise site.error(
                f"returned {told} when it was asked for facts of {context.engine}.",
                "Facts are an EngineFacts of the engine asked for; probes would read anything else wrongly.",
                f"Report it to the authors of {site.distribution}, or pin or install another backend.",
            )
        return facts

    def call_plan_launch(self, selected: Selected, context: LaunchContext) -> LaunchPlan:
        """`weightlane_plan_launch` of the chosen backend."""
        plan: LaunchPlan = self._call(selected, "weightlane_plan_launch", context)
        return plan

    def call_open_endpoint(self, selected: Selected, context: EndpointContext) -> EngineEndpoint:
        """`weightlane_open_endpoint` of the chosen backend."""
        endpoint: EngineEndpoint = self._call(selected, "weightlane_open_endpoint", context)
        return endpoint

    def call_map_names(self, selected: Selected, context: MapNamesContext) -> tuple[NameEntry, ...]:
        """`weightlane_map_names` of the chosen backend."""
        hook = "weightlane_map_names"
        answer: Sequence[NameEntry] = self._call(selected, hook, context)
        with blamed_on(_site(selected, hook)):  # a generator does its work only now
            return tuple(answer)

    def call_trace_model(
        self, selected: Selected, context: TraceModelContext
    ) -> tuple[PlacementTable, ...] | Untraced:
        """`weightlane_trace_model` of the chosen backend; `Untraced` when its plugin has no such hook."""
        hook = "weightlane_trace_model"
        if not self.implements(selected, hook):
            return Untraced(f"{selected.origin} traces only an engine that runs")
        answer: tuple[PlacementTable, ...] | Untraced = self._call(selected, hook, context)
        return answer

    def call_express_adapter(self, selected: Selected, context: ExpressAdapterContext) -> AdapterExpression:
        """`weightlane_express_adapter` of the chosen backend."""
        expression: AdapterExpression = self._call(selected, "weightlane_express_adapter", context)
        return expression

    def call_build_requests(self, selected: Selected, context: BuildRequestsContext) -> Program:
        """`weightlane_build_requests` of the chosen backend."""
        program: Program = self._call(selected, "weightlane_build_requests", context)
        return program

    def call_plan_lifecycle(self, selected: Selected, context: BuildRequestsContext) -> Lifecycle:
        """`weightlane_plan_lifecycle` of the chosen backend."""
        lifecycle: Lifecycle = self._call(selected, "weightlane_plan_lifecycle", context)
        return lifecycle

    def call_plan_trainer_lifecycle(
        self, selected: Selected, context: TrainerLifecycleContext
    ) -> TrainerLifecycle:
        """`weightlane_plan_lifecycle` of the chosen trainer backend."""
        hook = "weightlane_plan_lifecycle"
        answer = self._call(selected, hook, context)
        if not isinstance(answer, TrainerLifecycle):
            raise _site(selected, hook).error(
                f"gave a {type(answer).__name__}.",
                "A trainer backend's share of the schedule is a TrainerLifecycle.",
                f"Upgrade {selected.distribution}, or pin another backend.",
            )
        return answer

    def call_describe_export(self, selected: Selected, context: ExportContext) -> RankManifest:
        """`weightlane_describe_export` of the chosen backend."""
        manifest: RankManifest = self._call(selected, "weightlane_describe_export", context)
        return manifest

    def call_normalize_peft_config(self, selected: Selected, context: PeftConfigContext) -> AdapterConfig:
        """`weightlane_normalize_peft_config` of the chosen backend."""
        config: AdapterConfig = self._call(selected, "weightlane_normalize_peft_config", context)
        return config

    def call_export_params(self, selected: Selected, context: StreamContext) -> ExportStream:
        """`weightlane_export_params` of the chosen backend; errors of later buckets name the plugin too.

        Where an adapter travels in its normal form, the plugin is given the adapter as it holds it.
        """
        hook = "weightlane_export_params"
        stream: ExportStream = self._call(selected, hook, as_trained(context))
        guarded = GuardedStream(stream, _site(selected, hook))
        return guarded if context.manifest.trained is None else NormalFormStream(guarded, context)

    def call_worker_agent(self, selected: Selected, context: AgentContext) -> WorkerEngine:
        """`weightlane_worker_agent` of the chosen backend."""
        engine: WorkerEngine = self._call(selected, "weightlane_worker_agent", context)
        return engine

    def emit(self, event: SyncEvent) -> None:
        """Tells every observer. One that fails is warned of once and stops neither sync nor others."""
        hook = "weightlane_sync_event"
        implementations = self._implementations(hook)
        plugins = [impl.plugin for impl in implementations if not is_wrapper(impl)]
        for plugin in plugins:
            others = [rival for rival in plugins if rival is not plugin]
            try:
                self._manager.subset_hook_caller(hook, others)(event=event)
            except Exception as exc:  # noqa: BLE001 - observers must not end a sync
                name = self._manager.get_name(plugin) or "of no name"
                site = HookSite(name, *self.owner_of(name), hook)
                warn_once(f"{site} failed in {hook}: {type(exc).__name__}: {exc}; the sync goes on.")

    def owner_of(self, plugin_name: str) -> tuple[str, str]:
        """Distribution and version of the plugin registered under this name."""
        return plugin_name.partition(":")[0], ""

    def _call(self, selected: Selected, hook: str, context: object) -> Any:
        site = _site(selected, hook)
        plugin = self._manager.get_plugin(selected.plugin_name)
        if plugin is None:
            raise PluginError(
                f"Backend {selected.origin} belongs to no plugin of this registry.",
                "It was selected by another registry or another process.",
                "Look it up here with backend_named().",
            )
        if not self.implements(selected, hook):
            raise site.error(
                "is not implemented.",
                f"The plugin registers backend {selected.descriptor.name}, and this step needs the hook.",
                f"Upgrade {selected.distribution}, or pin another backend.",
            )
        answers = self._ask(plugin, hook, site, context)
        if not answers:
            raise site.error(
                "returned nothing.",
                "A chosen backend must answer; None cannot be told from an oversight.",
                f"Upgrade {selected.distribution}, or pin another backend.",
            )
        return answers[0]

    def _ask(self, plugin: object, hook: str, site: HookSite, context: object) -> list[Any]:
        """Calls one plugin's implementation together with wrappers; the answer is a list of none or one."""
        implementations = self._implementations(hook)
        rivals = [
            impl.plugin for impl in implementations if impl.plugin is not plugin and not is_wrapper(impl)
        ]

        def called() -> dict[CodeType, HookSite]:
            return {
                impl.function.__code__: HookSite(impl.plugin_name, *self.owner_of(impl.plugin_name), hook)
                for impl in implementations
                if hasattr(impl.function, "__code__")
            }

        with blamed_on(site, called):
            answers: list[Any] = self._manager.subset_hook_caller(hook, rivals)(context=context)
        return answers

    def _implementations(self, hook: str) -> list[Any]:
        implementations: list[Any] = getattr(self._manager.hook, hook).get_hookimpls()
        return implementations


def is_wrapper(implementation: Any) -> bool:
    """Whether an implementation is cross-cutting: it wraps whichever backend was chosen."""
    return bool(implementation.wrapper or implementation.hookwrapper)


def _site(selected: Selected, hook: str) -> HookSite:
    return HookSite(selected.plugin_name, selected.distribution, selected.version, hook)
