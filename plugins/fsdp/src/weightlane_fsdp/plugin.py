"""The `fsdp` backend: its hooks, the same for both eras. torch stays inside the hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.hookspecs import hookimpl
from weightlane.program import TrainerLifecycle
from weightlane_fsdp.eras import ERAS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlane.contexts import (
        ExportContext,
        FactsContext,
        PeftConfigContext,
        StreamContext,
        TrainerLifecycleContext,
    )
    from weightlane.facts import EngineFacts
    from weightlane.manifest import RankManifest
    from weightlane.peft import AdapterConfig
    from weightlane.stream import ExportStream
    from weightlane.types import BackendDescriptor


@hookimpl
def weightlane_register_backends() -> Iterable[BackendDescriptor]:
    """One backend in two eras, by what torch offers to gather with."""
    return ERAS


@hookimpl
def weightlane_collect_facts(context: FactsContext) -> EngineFacts | None:
    """The installed torch, and which of the names are there that the eras differ in."""
    from weightlane_fsdp.facts import installed_facts

    return installed_facts(context.search_path)


@hookimpl
def weightlane_plan_lifecycle(context: TrainerLifecycleContext) -> TrainerLifecycle:
    """Copies of a shard that lies on the CPU: whole and beforehand (`staging="shard"`), or part by part."""
    from weightlane_fsdp.options import read_options

    if read_options(context.options).staging == "parts":
        return TrainerLifecycle(
            notes=("parts that lie on the CPU are brought to the GPU as they are gathered",)
        )
    return TrainerLifecycle(
        onload="copy the parts that lie on the CPU to the GPU",
        offload="drop these copies",
        notes=("what FSDP's own policy offloads is brought to the GPU part by part all the same",),
    )


@hookimpl
def weightlane_describe_export(context: ExportContext) -> RankManifest:
    """This rank's shards under checkpoint names, without a collective."""
    from weightlane_fsdp.describe import describe

    return describe(context)


@hookimpl
def weightlane_normalize_peft_config(context: PeftConfigContext) -> AdapterConfig:
    """The configuration that peft left on the module inside all wrappers."""
    from weightlane_fsdp.adapter import normalized

    return normalized(context)


@hookimpl
def weightlane_export_params(context: StreamContext) -> ExportStream:
    """Shards gathered bucket by bucket in the lane's own groups."""
    from weightlane_fsdp.stream import FsdpStream

    return FsdpStream(context)
