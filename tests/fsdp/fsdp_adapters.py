"""Sharded adapters into a reference engine that rank 0 holds: never onto a base that is not theirs."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from fsdp_wrappers import WRAPPERS
from peft_wrappers import lora

import weightlane as wl
from weightlane import agent
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.errors import SyncError
from weightlane.reference.engine import ReferenceEngine
from weightlane.residency import ReplicaResidency
from weightlane.testing.greedy import Continuation, forced_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.lane import Lane

BOUNDS = replace(DEFAULT_BOUNDS, connect=60.0, start=30.0, finish=30.0, bucket=30.0)
PROMPTS = ([1, 2, 3], [7, 11, 13])


def adapted() -> Any:
    return tiny_models.disturb(lora(tiny_models.even()))


class Bench:
    """A lane in mode adapter whose engine was started from another checkpoint of the same shape."""

    def __init__(self, wrapper: str, opened: ExitStack) -> None:
        engine = None
        if dist.get_rank() == 0:
            folder = opened.enter_context(tempfile.TemporaryDirectory())
            tiny_models.even().save_pretrained(folder)  # type: ignore[operator]
            engine = ReferenceEngine(folder)
        self.lane: Lane = opened.enter_context(
            wl.connect(
                trainer=wl.trainer("fsdp", model=WRAPPERS[wrapper](adapted())),
                rollout=[wl.rollout("reference", engine=engine)] if engine else None,
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
        mine = forced_logprobs(adapted().eval(), PROMPTS, given)
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


ADAPTERS: dict[str, Callable[[], None]] = {
    **{
        f"an adapter without its base / {name}": partial(an_adapter_without_its_base_is_refused, name)
        for name in ("fsdp1", "fsdp2")
    },
    "an adapter without its base, without the rule": without_the_rule_it_serves_on_another_base,
}
