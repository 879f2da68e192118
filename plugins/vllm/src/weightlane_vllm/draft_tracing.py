"""Which tensors of a load a drafter takes: seen in a trace of its own loader, before that of both models.

What it shares with the model (embeddings, the head) is written through the model, once. What it holds of
its own, a copy included, it is handed. A drafter with another checkpoint than the model's is offered only
what the model does not expect, so that none of the model's tensors can land in it by a name that both have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from weightlane_vllm.draft_routes import PREFIX
from weightlane_vllm.tracing import DraftPart, live_tensors_of, traced_load

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from weightlane.messages import WireTensor
    from weightlane.trace.table import PlacementTable, TableKey
    from weightlane_vllm.drafter import DrafterPolicy


def draft_part(
    model: nn.Module,
    drafter: nn.Module,
    policy: DrafterPolicy,
    key: TableKey,
    tensors: Sequence[WireTensor],
    expected: Collection[str],
) -> DraftPart:
    """The drafter's part of a load of `tensors`.

    Args:
        model: the one that serves.
        drafter: its drafter's; both live, or both on the meta device.
        policy: what a sync does with it.
        key: of the trace.
        tensors: canonical names, full shapes and dtypes.
        expected: names of the checkpoint of `model`.
    """
    alone = frozenset(item.name for item in tensors if item.name not in expected)
    offered = _offered(policy, tensors, alone)
    if not offered:
        return DraftPart(drafter, alone=alone, kept="" if policy.rule == "follows" else policy.kept)
    canonical = {item.name: name for name, item in offered.items()}
    load = traced_load(drafter, key, [*offered.values()])
    taken = {canonical[name]: wire for name, wire in _taken(load.table, model, drafter).items()}
    buffers = load.routes.buffers
    return DraftPart(
        drafter,
        names={name: wire for name, wire in taken.items() if wire not in buffers},
        buffers={name: buffers[wire] for name, wire in taken.items() if wire in buffers},
        alone=alone,
        kept="" if taken or policy.rule == "follows" else policy.kept,
    )


def _offered(
    policy: DrafterPolicy, tensors: Sequence[WireTensor], alone: Collection[str]
) -> Mapping[str, WireTensor]:
    """By canonical name, under the name of the drafter's checkpoint.

    One with `draft.` before it is the drafter's and comes in the place of one without.
    """
    if policy.rule not in ("follows", "if-exported"):
        return {}
    meant = {name: name.removeprefix(PREFIX) for name in alone if name.startswith(PREFIX)}
    instead = {*meant.values()}
    return {
        item.name: replace(item, name=meant.get(item.name, item.name))
        for item in tensors
        if item.name in meant
        or (item.name not in instead and (policy.rule == "follows" or item.name in alone))
    }


def _taken(table: PlacementTable, model: nn.Module, drafter: nn.Module) -> dict[str, str]:
    """Sources that land in a tensor of the drafter's own, and what its loader is handed for each.

    After an obstacle that is not known of the rest, which is taken along: the trace of both meets the
    obstacle again, and the plan tells it.
    """
    shared = {id(tensor) for tensor in live_tensors_of(model).values()}
    live = live_tensors_of(drafter)
    own: set[int] = set()
    placed: set[int] = set()
    for item in table.placements:
        placed.add(item.source)
        if id(live.get(table.targets[item.target].name)) not in shared:
            own.add(item.source)
    if table.obstacles:
        own |= {*range(len(table.sources))} - placed
    return {table.sources[number].canonical: table.sources[number].wire for number in sorted(own)}
