"""An adapter beyond its configuration: how an engine takes it, what requests name, what was bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import xxhash

from weightlane.errors import SyncError
from weightlane.peft import AdapterConfig

if TYPE_CHECKING:
    from weightlane.lane_messages import SyncReport
    from weightlane.plan import LanePlan

SwapPolicy: TypeAlias = Literal["two_slot", "paused"]
"""`two_slot`: the old adapter serves until the new one is verified and published. `paused`: one slot and a
name that never changes; generation is held back across the swap."""

SWAP_POLICIES: tuple[SwapPolicy, ...] = ("two_slot", "paused")
SLOTS_NEEDED: dict[SwapPolicy, int] = {"two_slot": 2, "paused": 1}
"""Adapters that an engine must be able to hold at once, for each adapter that a lane serves there."""

GenerationDuringSync: TypeAlias = Literal["held", "goes-on", "engine-held"]
"""Whether a front holds generation back from the first message of a sync until it is published.

`engine-held`: it keeps new requests back; those that run are held by the engine's own pause, so that it does
not wait for them."""


AdapterForm: TypeAlias = Literal["as-trained", "normal"]
"""How matrices travel. `as-trained`: as the trainer holds them. `normal`: one rank by zero padding, the scale
folded into B, whole groups, for engines that ignore patterns (`weightlane.peft.normal_form`)."""


class AdapterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request must name to be answered with an adapter: `name`, which holds weights of `version`."""

    name: str
    version: int


class AdapterExpression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's way to take an adapter; `weightlane_express_adapter` gives it.

    `wire` is the configuration as the JSON object that the engine's own loader reads. `carries` lists the
    features that it takes beyond one rank and one scale, by peft's keys (`weightlane.peft.features`); any
    other that the adapter has is refused by name. `form` is the one that the engine needs, which becomes that
    of the whole lane; `groups` are leaf names of modules that it takes together or not at all (`q_proj`,
    `k_proj`, `v_proj`): in the normal form, missing ones are filled with zeros.
    """

    swap: SwapPolicy
    wire: str
    notes: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()
    form: AdapterForm = "as-trained"
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def generation(self) -> GenerationDuringSync:
        """What a front does with generation while this adapter is synced."""
        return "goes-on" if self.swap == "two_slot" else "held"


class TrainedBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base that an adapter was trained on, on which alone it means something.

    `identity` is what workers remember of a base that they hold. `values` maps each of its tensors to the
    digest of its values (`weightlane.base_digest`), where the trainer can tell without a collective: then the
    identity is theirs, else this lane's own. `sent_by` names the lane that sends it; "" where none can, for
    the reason `not_sent`: then the receiver must hold it already.
    """

    identity: str
    values: dict[str, str] = {}
    sent_by: str = ""
    not_sent: str = ""


def trained_base(values: dict[str, str], *, lane: str, not_sent: str) -> TrainedBase:
    """The base of `lane`'s adapter, of which `values` are known; `not_sent`: why it cannot be sent.

    Two lanes whose trainers can tell the values mean one base if these are equal.
    """
    told = msgspec.msgpack.encode(sorted(values.items())) if values else f"the base of {lane}".encode()
    sent_by = "" if not_sent else f"{lane}.base"
    return TrainedBase(xxhash.xxh3_64_hexdigest(told), values, sent_by, not_sent)


class AdapterPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver needs to know of an adapter beside its tensors; the same over every transport."""

    config: AdapterConfig
    expression: AdapterExpression
    base: TrainedBase


class BoundModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One module that an engine applies an adapter to, by checkpoint name, as the engine itself holds it."""

    module: str
    rank: int
    scaling: float


class AdapterBinding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an engine bound an adapter, read back from its active set, never from what it was given.

    `unread` says why nobody could read it back, and what is known instead; there are no `modules` then. Only
    an engine that takes requests alone may say so: an agent looks for itself.
    """

    ref: AdapterRef
    modules: tuple[BoundModule, ...]
    unread: str = ""


def adapter_ref(config: AdapterConfig, swap: SwapPolicy, version: int) -> AdapterRef:
    """The name under which `version` is served: worked out alike on every rank and every worker."""
    return AdapterRef(f"{config.name}@{version}" if swap == "two_slot" else config.name, version)


def published_adapter(plan: LanePlan, published: SyncReport | None) -> AdapterRef:
    """What requests to any replica of a lane must name now.

    Raises:
        SyncError: the lane moves no adapter, or has published none.
    """
    config = plan.manifest.adapter
    expressions = [replica.adapter for replica in plan.replicas if replica.adapter is not None]
    if config is None or not expressions:
        raise SyncError(
            f"Lane {plan.lane} has no adapter to name.",
            f"Its mode is {plan.mode.value}: the engine's own weights are the trainer's.",
            "Leave the adapter out of requests, or connect with mode='adapter'.",
        )
    if published is None:
        raise SyncError(
            f"Lane {plan.lane} has not published adapter {config.name} yet.",
            "Until it has, the engines serve the base alone.",
            "Sync once before you generate.",
        )
    return adapter_ref(config, expressions[0].swap, published.version)
