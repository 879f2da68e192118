"""A trainer that loads before it exports and offloads afterwards; everything else is the torch trainer's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightlane.facts import EngineFacts
from weightlane.hookspecs import hookimpl
from weightlane.program import TrainerLifecycle
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.export import TorchStream
from weightlane.torch_trainer.plugin import TORCH

if TYPE_CHECKING:
    from weightlane.contexts import ExportContext, FactsContext, StreamContext, TrainerLifecycleContext
    from weightlane.manifest import RankManifest


class FakeLoadingStream(TorchStream):
    def __init__(self, context: StreamContext, plugin: FakeLoadingTrainer) -> None:
        super().__init__(context)
        self._plugin = plugin

    def onload(self) -> None:
        self._plugin.notes.append("onload")
        if self._plugin.fails:
            raise RuntimeError("no room for the parameters")

    def offload(self) -> None:
        self._plugin.notes.append("offload")


class FakeLoadingTrainer:
    """A plugin object; appends what its streams do to `notes`."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.fails = False
        self.stream: type[TorchStream] = FakeLoadingStream

    @hookimpl
    def weightlane_register_backends(self) -> list[object]:
        return [replace(TORCH, name="loading", engine="loading")]

    @hookimpl
    def weightlane_collect_facts(self, context: FactsContext) -> EngineFacts:
        return EngineFacts(engine="loading", version="2.9", source="installed")

    @hookimpl
    def weightlane_plan_lifecycle(self, context: TrainerLifecycleContext) -> TrainerLifecycle:
        assert context.manifest.tensors
        return TrainerLifecycle(onload="parameters to the device", offload="parameters to the host")

    @hookimpl
    def weightlane_describe_export(self, context: ExportContext) -> RankManifest:
        return describe(context)

    @hookimpl
    def weightlane_export_params(self, context: StreamContext) -> TorchStream:
        if self.stream is FakeLoadingStream:
            return FakeLoadingStream(context, self)
        return self.stream(context)
