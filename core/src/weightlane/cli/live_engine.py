"""Looks at a live engine: what a lane from here would plan, without one. Nothing is written or published."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weightlane.assumptions import snapshot_of
from weightlane.checkpoint_folder import CheckpointFolder, read_checkpoint_folder
from weightlane.cli.receiver_look import Look
from weightlane.contexts import RolloutTarget
from weightlane.errors import EngineDeadError, EngineError, PlanError, WeightlaneError
from weightlane.front.address import is_front_address
from weightlane.manifest import RankManifest
from weightlane.planning import OpenReplica, PlanRequest, make_plan, map_replicas, open_replicas
from weightlane.trace.asking import ask_for_tables, sources_to_trace
from weightlane.trace.table import Untraced
from weightlane.types import Mode, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightlane.errors import Problem
    from weightlane.registry import Registry
    from weightlane.replica_mapping import MappedReplica
    from weightlane.trace.table import PlacementTable

_SECONDS = 60.0
_BUCKET_BYTES = 256 << 20
_TRAINER = "torch"


def engine_at(registry: Registry, address: str) -> str:
    """Which engine answers at an address.

    Raises:
        EngineError: nothing listens there, or none of those that are registered does.
    """
    if is_front_address(address):
        from weightlane.front.client import FrontEndpoint

        with _listening(address):
            return FrontEndpoint(address, _SECONDS).facts().engine
    said: list[str] = []
    rollouts = dict.fromkeys(
        item.descriptor.engine for item in registry.backends() if item.descriptor.role == "rollout"
    )
    for engine in rollouts:
        try:
            with _listening(address):
                facts = registry.collect_facts(engine, RolloutTarget(engine, address=address))
        except WeightlaneError as error:
            said.append(f"{engine}: {error.what}")
        else:
            if facts.version:
                return engine
    raise EngineError(
        f"No engine that is registered here answers at {address}.",
        " ".join(said),
        "Check the address, or name the engine with --engine.",
    )


def look_at_live(registry: Registry, engine: str, address: str, model: Path) -> Look:
    """What the checkpoint in `model` would meet in the engine at `address`.

    Raises:
        UsageError: the folder is no checkpoint.
        SelectionError: no backend fits the engine.
        EngineError: it does not answer, or failed while it traced.
    """
    checkpoint = read_checkpoint_folder(model)
    request = _request(registry, engine, address, str(model))
    part = RankManifest(
        rank=0,
        world_size=1,
        phase=Phase.FULL,
        tensors=checkpoint.manifest.tensors,
        host=socket.gethostname(),
    )
    with _opened(registry, request) as replica:
        (asked,) = map_replicas(registry, request, [part], [replica])
        if asked.mapped is None:
            raise AssertionError("a manifest of one rank agrees with itself")
        worker = replica.workers[0]
        sources = sources_to_trace(checkpoint.manifest, worker.expected, worker.beyond)
        answer = ask_for_tables(replica, checkpoint.manifest, sources, _SECONDS)
        transport, problems = "", asked.mapped.problems
        try:
            transport = make_plan(registry, request, [part], [asked]).replicas[0].transport.value
        except PlanError as error:
            problems = (*problems, *(item for item in error.problems if item not in problems))
        return _look(asked, asked.mapped, checkpoint, answer, problems, transport)


def _request(registry: Registry, engine: str, address: str, model: str) -> PlanRequest:
    trainer = registry.backend_named(_TRAINER)
    if trainer is None:
        raise EngineError(
            "The trainer for plain torch modules is not registered here.",
            "A plan has a trainer, and a checkpoint folder is planned as one of these.",
            "Do not disable the plugin torch of weightlane.",
        )
    return PlanRequest(
        lane="plan",
        mode=Mode.FULL,
        verify="digest",
        bucket_bytes=_BUCKET_BYTES,
        transport=None,
        trainer_backend=_TRAINER,
        targets=(RolloutTarget(engine, address=address, model=model),),
        pins=(None,),
        open_seconds=_SECONDS,
    )


@contextmanager
def _opened(registry: Registry, request: PlanRequest) -> Iterator[OpenReplica]:
    with _listening(request.targets[0].address):
        (replica,) = open_replicas(registry, request)
    try:
        yield replica
    finally:
        replica.endpoint.close()


@contextmanager
def _listening(address: str) -> Iterator[None]:
    """Around the first call: an engine that was never met is not one that died."""
    try:
        yield
    except EngineDeadError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise EngineDeadError(
            f"Nothing listens at {address}.",
            "There is no such socket."
            if isinstance(cause, FileNotFoundError)
            else "The connection was refused: no engine was started there, or the one that was has ended.",
            "Check the address, or start an engine there, as `weightlane launch-args` tells.",
        ) from error


def _look(
    replica: OpenReplica,
    mapped: MappedReplica,
    checkpoint: CheckpointFolder,
    answer: tuple[PlacementTable, ...] | Untraced,
    problems: tuple[Problem, ...],
    transport: str,
) -> Look:
    tables = () if isinstance(answer, Untraced) else answer
    facts = replica.facts
    assumed = mapped.coverage == "assumed"
    contract = snapshot_of(replica.selected.descriptor, facts, replica.workers) if assumed else None
    return Look(
        receiver=f"{facts.engine} {facts.version} at {replica.endpoint.address}",
        engine_version=facts.version,
        selected=replica.selected,
        basis="live engine" if tables else "snapshot" if assumed else "static rules",
        coverage=mapped.coverage,
        reason=mapped.reason,
        tensor_parallel=max(facts.parallel.tensor, len(replica.workers)),
        lora=facts.launch_arguments.get("enable_lora") == "true",
        checkpoint=checkpoint,
        entries=mapped.entries,
        dropped={entry.canonical: entry.dropped for entry in mapped.entries if entry.dropped},
        problems=problems,
        tables=tables,
        contract=None if isinstance(contract, Untraced) else contract,
        notes=replica.selected.notes,
        transport=transport,
    )
