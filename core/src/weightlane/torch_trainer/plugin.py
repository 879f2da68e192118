"""Registers the trainer backend `torch`. Imports no torch: exporting code is loaded by the hooks."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.facts import EngineFacts
from weightlane.hookspecs import hookimpl
from weightlane.probes import always_viable
from weightlane.program import TrainerLifecycle
from weightlane.types import BackendDescriptor, Capability

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlane.contexts import (
        ExportContext,
        FactsContext,
        PeftConfigContext,
        StreamContext,
        TrainerLifecycleContext,
    )
    from weightlane.manifest import RankManifest
    from weightlane.peft import AdapterConfig
    from weightlane.stream import ExportStream

TORCH = BackendDescriptor(
    name="torch",
    role="trainer",
    engine="torch",
    era="state-dict",
    versions=SpecifierSet(">=2.4"),
    distributions=("torch",),
    probe=always_viable,
    capabilities=frozenset(
        {
            Capability.EXPORT_FULL,
            Capability.EXPORT_MERGED,
            Capability.EXPORT_ADAPTER,
            Capability.EXPORT_BASE,
        }
    ),
    options=frozenset({"placement", "adapter"}),
    summary="plain torch modules, replicated on every rank or partitioned over ranks",
    install_hint="pip install torch",
)


@hookimpl
def weightlane_register_backends() -> Iterable[BackendDescriptor]:
    """The one backend of this plugin."""
    return (TORCH,)


@hookimpl
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:  # noqa: ARG001 - pluggy's
    """The installed torch, from metadata; a trainer has no other target than this process."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return EngineFacts(engine="torch", version=version, source="installed")


@hookimpl
def weightlane_plan_lifecycle(context: TrainerLifecycleContext) -> TrainerLifecycle:  # noqa: ARG001
    """Nothing to load and nothing to offload: a plain module stays where its owner put it."""
    return TrainerLifecycle()


@hookimpl
def weightlane_describe_export(context: ExportContext) -> RankManifest:
    """This rank's tensors under their state-dict names."""
    from weightlane.torch_trainer.describe import describe

    return describe(context)


@hookimpl
def weightlane_normalize_peft_config(context: PeftConfigContext) -> AdapterConfig:
    """The configuration that peft left on the module."""
    from weightlane.torch_trainer.adapter import adapter_config

    return adapter_config(context)


@hookimpl
def weightlane_export_params(context: StreamContext) -> ExportStream:
    """Live tensors where every sending rank holds them, broadcasts where not."""
    from weightlane.torch_trainer.export import TorchStream

    return TorchStream(context)
