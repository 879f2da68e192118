"""Sharded adapters into a reference engine that rank 0 holds: never onto a base that is not theirs."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import tiny_models
import torch
import torch.distributed as dist
from fsdp_wrappers import WRAPPERS
from peft_wrappers import lora

import weightlane as wl
from weightlane import agent, normal_stream
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.errors import SyncError
from weightlane.reference import expression
from weightlane.reference.engine import ReferenceEngine
from weightlane.residency import ReplicaResidency
from weightlane.testing.greedy import Continuation, forced_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane
    from weightlane.peft.normal_form import TensorTransform

    Undo = Callable[[pytest.MonkeyPatch], None]

BOUNDS = replace(DEFAULT_BOUNDS, connect=60.0, start=30.0, finish=30.0, bucket=30.0)
GROUPS = (("q_proj", "k_proj", "v_proj"),)
PROMPTS = ([1, 2, 3], [7, 11, 13])


def adapted() -> Any:
    return tiny_models.disturb(lora(tiny_models.even()))


class Bench:
    """A lane in mode adapter whose engine was started from another checkpoint of the same shape."""

    def __init__(
        self, wrapper: str, opened: ExitStack, make: Callable[[], Any] = adapted, trainer: str = "fsdp"
    ) -> None:
        self.make = make
        self.engine: Any = None
        if dist.get_rank() == 0:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            tiny_models.even().save_pretrained(folder)  # type: ignore[operator]
            self.engine = ReferenceEngine(folder)
        self.lane: Lane = opened.enter_context(
            wl.connect(
                trainer=wl.trainer(trainer, model=WRAPPERS[wrapper](make())),
                rollout=[wl.rollout("reference", engine=self.engine)] if self.engine else None,
                bounds=BOUNDS,
                mode="adapter",
                bucket_bytes=16 << 10,
            )
        )

    def apart(self) -> float:
        """The largest difference of log-probs between the engine and a trainer that nothing shards."""
        if dist.get_rank():
            return 0.0
        said = self.lane.replicas[0].generate(PROMPTS, max_tokens=4, adapter=self.lane.adapter_ref())
        given = [Continuation(item.token_ids, item.logprobs) for item in said]
        mine = forced_logprobs(self.make().eval(), PROMPTS, given)
        pairs = zip(mine, given, strict=True)
        return max(float((first - torch.tensor(item.logprobs)).abs().max()) for first, item in pairs)


def an_adapter_without_its_base_is_refused(wrapper: str) -> None:
    """On every rank and before anything is loaded, where the controller takes the base for sent."""
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        bench = Bench(wrapper, opened)
        with patch.context() as undone:
            undone.setattr(ReplicaResidency, "why_no_base", lambda self, identity: "")
            with pytest.raises(SyncError, match=r"does not hold the base.*Sync again: it is sent again"):
                bench.lane.sync(1)
        report = bench.lane.sync(2)
        assert [phase.phase.value for phase in report.phases] == ["base", "adapter"]
        assert bench.apart() < 1e-4


def without_the_rule_it_serves_on_another_base() -> None:
    """What neither the controller nor the worker asks: the sync succeeds, and the policy is another one."""
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        bench = Bench("fsdp2", opened)
        patch.setattr(ReplicaResidency, "why_no_base", lambda self, identity: "")
        patch.setattr(agent, "require_residency", lambda *_, **__: None)
        assert [phase.phase.value for phase in bench.lane.sync(1).phases] == ["adapter"]
        assert bench.apart() > 1e-2 or dist.get_rank()


# -- the normal form ----------------------------------------------------------------------------------------


def patterned() -> Any:
    """Ranks and scales of their own, rank-stabilised, and a query without key and value beside it."""
    return tiny_models.disturb(
        lora(
            tiny_models.even(),
            target_modules=["q_proj", "o_proj", "down_proj"],
            rank_pattern={r"layers\.0\.self_attn\.q_proj": 6, "down_proj": 2},
            alpha_pattern={"o_proj": 5, r"layers\.1\.mlp\.down_proj": 3},
            use_rslora=True,
        )
    )


def wants_normal(patch: pytest.MonkeyPatch) -> None:
    """The reference engine as one that ignores patterns and takes whole groups."""
    whole = expression.express

    def express(context: Any) -> Any:
        return msgspec.structs.replace(whole(context), form="normal", carries=(), groups=GROUPS)

    patch.setattr(expression, "express", express)


def fold_no_scale(patch: pytest.MonkeyPatch) -> None:
    whole = normal_stream.transform

    def transform(change: TensorTransform, source: Any, **options: Any) -> torch.Tensor:
        return whole(dataclasses.replace(change, factor=1.0), source, **options)

    patch.setattr(normal_stream, "transform", transform)


@cache
def held_in_normal_form(wrapper: str, trainer: str, undo: Undo | None = None) -> dict[str, Any]:
    """What the engine has bound after a sync, by module; {} on the rank without it."""
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        wants_normal(patch)
        if undo is not None:
            undo(patch)
        bench = Bench(wrapper, opened, patterned, trainer)
        assert bench.lane.plan().manifest.trained is not None
        bench.lane.sync(1)
        assert bench.apart() < 1e-4 or undo is not None
        if bench.engine is None:
            return {}
        (slot,) = bench.engine._adapters._slots.values()
        return dict(slot.deltas)


def the_normal_form_is_the_unsharded_one(wrapper: str) -> None:
    """Bit for bit the torch trainer's, and each module's effect what its layer has, to 1e-6."""
    found, wanted = held_in_normal_form(wrapper, "fsdp"), held_in_normal_form("plain", "torch")
    if dist.get_rank():
        return
    layers = layers_of_adapter()
    assert found.keys() == wanted.keys()
    assert set(layers) < set(found), "key and value came with the query"
    for module, delta in found.items():
        assert torch.equal(delta.first, wanted[module].first), module
        assert torch.equal(delta.second, wanted[module].second), module
        assert (delta.first.shape[0], delta.scaling) == (6, 1.0)
        effect = delta.second.double() @ delta.first.double()
        trained = layers[module] if module in layers else torch.zeros_like(effect)
        torch.testing.assert_close(effect, trained, rtol=0, atol=1e-6)


def layers_of_adapter() -> dict[str, torch.Tensor]:
    """What each layer of the unsharded model adds to its weight, in double precision, by module."""
    found = {}
    for path, layer in patterned().named_modules():
        if "default" in getattr(layer, "lora_A", {}):
            first, second = (
                side["default"].weight.detach().double() for side in (layer.lora_A, layer.lora_B)
            )
            found[path.removeprefix("base_model.model.")] = second @ first * layer.scaling["default"]
    return found


def without_the_scale_the_effect_is_another() -> None:
    """The rule undone: what an engine that reads one alpha would apply is seen to be another effect."""
    found = held_in_normal_form("fsdp2", "fsdp", fold_no_scale)
    if dist.get_rank():
        return
    for module, trained in layers_of_adapter().items():
        effect = found[module].second.double() @ found[module].first.double()
        assert float((effect - trained).abs().max()) > 1e-3, module


ADAPTERS: dict[str, Callable[[], None]] = {
    "an adapter without its base": partial(an_adapter_without_its_base_is_refused, "fsdp2"),
    "an adapter without its base, without the rule": without_the_rule_it_serves_on_another_base,
}

NORMAL: dict[str, Callable[[], None]] = {
    **{
        f"normal form / {name}": partial(the_normal_form_is_the_unsharded_one, name)
        for name in ("fsdp1 flat", "fsdp2")
    },
    "normal form, without the scale": without_the_scale_the_effect_is_another,
}
