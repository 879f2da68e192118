"""Trainer side and engine in two processes: agent messages through the front, by value."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane import failures, messages
from weightlane.buckets import lay_out_buckets
from weightlane.cli.live_engine import look_at_live
from weightlane.errors import EngineDeadError, NotServableError
from weightlane.front.client import FrontEndpoint
from weightlane.front.process import FrontProcess, start_front_process
from weightlane.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = ((1, 2, 3), (4, 5), (6, 7, 8))


@pytest.fixture(scope="module")
def process(untied_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    folder = tmp_path_factory.mktemp("engine")
    address = f"unix:{folder}/s/front"
    argv = [sys.executable, "-m", "weightlane.reference.server", "--threads", "1"]
    argv += ["--model", untied_folder, "--address", address]
    with start_front_process(argv, address, log=folder / "log", ready_timeout_seconds=90.0) as process:
        yield process


class Sender:
    """What a lane does with an inline replica, in the order of its messages."""

    def __init__(self, endpoint: FrontEndpoint, weights: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.weights = weights
        wires = tuple(messages.WireTensor(name, tuple(t.shape), "float32") for name, t in weights.items())
        buckets = lay_out_buckets(wires, bucket_bytes=128 << 10)
        self.plan = messages.ReceivePlan("lane", "digest", "reference", "inline", wires, buckets)
        self.incarnation = {0: endpoint.describe_workers("reference")[0].incarnation}

    def tell(self, request: Any) -> messages.AgentReply:
        (data,) = self.endpoint.call_workers(messages.encode(request), 20.0)
        reply: messages.AgentReply = messages.decode(data, messages.AgentReply, sender="worker")
        if isinstance(reply, messages.Failure):
            raise failures.error_of(reply)
        return reply

    def begin(self, sync: int, version: int) -> None:
        self.tell(messages.Attach(self.plan))
        self.tell(messages.BeginInline("lane", "digest", sync, version, self.incarnation))

    def load(self, sync: int, bucket: int) -> None:
        import torch

        from weightlane.packing import memory_of, pack_bucket

        layout = self.plan.buckets[bucket]
        memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        tensors = list(self.weights.values())
        pack_bucket(
            memory,
            layout,
            self.plan.tensors,
            [(entry.tensor, tensors[entry.tensor]) for entry in layout.entries],
        )
        self.tell(messages.LoadInline("lane", sync, bucket, bytes(memory_of(memory))))

    def finish(self, sync: int, version: int) -> messages.ReceiveReport:
        report = self.tell(messages.FinishInline("lane", sync))
        assert isinstance(report, messages.ReceiveReport)
        self.tell(messages.Publish("lane", sync, version))
        return report


def test_a_sync_through_the_front_makes_the_engine_the_trainers_twin(
    process: FrontProcess, other_untied: dict[str, Any], untied_folder: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    endpoint = FrontEndpoint(process.address, 30.0)
    assert endpoint.facts().model_path == untied_folder
    before = endpoint.generate(PROMPTS, max_tokens=5)
    sender = Sender(endpoint, other_untied)
    assert len(sender.plan.buckets) > 2
    sender.begin(1, 11)
    for bucket in range(len(sender.plan.buckets)):
        sender.load(1, bucket)
    report = sender.finish(1, 11)
    assert (report.tensors, report.loaded) == (len(other_untied), len(other_untied))

    trainer = AutoModelForCausalLM.from_pretrained(untied_folder).eval()
    trainer.load_state_dict(other_untied)
    moved = 0.0
    for prompt, old, answer in zip(PROMPTS, before, endpoint.generate(PROMPTS, max_tokens=5), strict=True):
        assert answer.weight_version == 11
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer.token_ids]])
            rows = trainer(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        assert rows.argmax(-1).tolist() == list(answer.token_ids)
        for row, token, logprob in zip(rows, answer.token_ids, answer.logprobs, strict=True):
            assert abs(float(row[token]) - logprob) < 1e-4
        moved = max(moved, *(abs(a - b) for a, b in zip(old.logprobs, answer.logprobs, strict=True)))
    assert moved > 1e-2


@pytest.mark.requirement("R68", part="full weights")
def test_a_sync_cancelled_half_way_is_refused_to_clients_until_a_whole_one(
    process: FrontProcess, other_untied: dict[str, Any]
) -> None:
    endpoint = FrontEndpoint(process.address, 30.0)
    sender = Sender(endpoint, other_untied)
    sender.begin(2, 12)
    sender.load(2, 0)
    sender.tell(messages.Cancel("lane", 2, "trainer rank 1 was killed"))
    with pytest.raises(NotServableError, match="trainer rank 1 was killed"):
        endpoint.generate(PROMPTS, max_tokens=1)
    assert not endpoint.describe_workers("reference")[0].servable
    sender.begin(3, 13)
    for bucket in range(len(sender.plan.buckets)):
        sender.load(3, bucket)
    sender.finish(3, 13)
    assert endpoint.generate(PROMPTS, max_tokens=1)[0].weight_version == 13


def test_a_sync_cancelled_before_its_first_write_leaves_the_engine_serving(
    process: FrontProcess, other_untied: dict[str, Any]
) -> None:
    endpoint = FrontEndpoint(process.address, 30.0)
    sender = Sender(endpoint, other_untied)
    held = endpoint.describe_workers("reference")[0].held_version
    sender.begin(4, 14)
    sender.tell(messages.Cancel("lane", 4, "a rank refused the plan"))
    assert endpoint.generate(PROMPTS, max_tokens=1)[0].weight_version == held


def test_plans_from_beside_leave_a_lane_that_syncs_meanwhile_alone(
    process: FrontProcess, untied_folder: str, other_untied: dict[str, Any]
) -> None:
    def look() -> tuple[str, tuple[object, ...]]:
        seen = look_at_live(Registry().load(), "reference", process.address, Path(untied_folder))
        return seen.coverage, seen.problems

    replicas = [wl.rollout("reference", url=process.address)]
    with (
        wl.connect(trainer=wl.trainer("torch", model=other_untied), rollout=replicas) as lane,
        ThreadPoolExecutor(1) as beside,
    ):
        looks = [beside.submit(look) for _ in range(3)]
        version = 20
        while not looks[-1].done():
            version += 1
            lane.sync(version=version)
        assert version > 21, "plans and syncs did not meet"
        lane.sync(version=version + 1)
        assert [done.result() for done in looks] == [("proven", ())] * 3
        assert lane.replicas[0].generate(PROMPTS, max_tokens=1)[0].weight_version == version + 1


def test_a_server_without_a_model_says_so_in_its_log(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s/front"
    argv = [
        sys.executable,
        "-m",
        "weightlane.reference.server",
        "--model",
        str(tmp_path),
        "--address",
        address,
    ]
    started = time.monotonic()
    with (
        pytest.raises(EngineDeadError, match=f"status 1 before[\\s\\S]*cannot load {tmp_path}"),
        start_front_process(argv, address, log=tmp_path / "log", ready_timeout_seconds=90.0),
    ):
        pytest.fail("served without a model")
    assert time.monotonic() - started < 90.0
