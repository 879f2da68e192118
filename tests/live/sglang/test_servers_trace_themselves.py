"""Live servers tell where every element lands, undisturbed; what would be lost is refused by name."""

from __future__ import annotations

import itertools
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import server_checks
import torch
from safetensors.torch import load_file, save_file

import weightlane as wl
from weightlane.errors import EngineError, PlanError
from weightlane.failures import Failure
from weightlane.messages import decode
from weightlane.testing.parity_run import run_parity
from weightlane.trace.coverage import coverage_problems, target_coverage
from weightlane.trace.table import Untraced
from weightlane_sglang.contract import PAYLOAD_FIELD, UPDATE_ROUTE
from weightlane_sglang.loader_channel import carry
from weightlane_sglang.loader_messages import MOST_REQUEST_BYTES, LoaderReply
from weightlane_sglang.loader_name import LOADER
from weightlane_sglang.payload import EncodedBucket, request_body
from weightlane_sglang.run_folder import exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightlane_sglang.endpoint import SglangEndpoint
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

TRACES = 100
AGREES = 1e-4
MOVED = 1e-2


@pytest.fixture
def endpoint(
    tiny_server: RunningServer, open_server: Callable[[RunningServer], SglangEndpoint]
) -> SglangEndpoint:
    return open_server(tiny_server)


def plan_of(server: RunningServer, model: Any) -> str:
    """The plan of a lane that is connected and closed again."""
    with wl.connect(
        trainer=wl.trainer("torch", model=model), rollout=[wl.rollout("sglang", url=server.url)]
    ) as lane:
        return str(lane.plan())


def assert_proven(endpoint: SglangEndpoint, ranks: int, *, lora: bool) -> None:
    tables = server_checks.traced(endpoint)
    assert coverage_problems(tables, {}, receiver="the server") == []
    assert [table.key.worker for table in tables] == list(range(ranks))
    assert {(table.key.tensor_parallel, table.key.lora) for table in tables} == {(ranks, lora)}
    assert {table.key.engine_version for table in tables} == {endpoint.facts().version}
    assert server_checks.differences_from_the_oracle(endpoint) == [[]] * ranks


def test_two_ranks_tell_where_every_element_lands_as_an_oracle_does(endpoint: SglangEndpoint) -> None:
    assert_proven(endpoint, 2, lora=False)
    tables = server_checks.traced(endpoint)
    (worker,) = endpoint.describe_workers("sglang")
    tied = {item.name: item.tied_to for item in worker.expected if item.tied_to}
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    filled = {item.target.name for table in tables for item in target_coverage(table) if item.filled}
    assert filled == {"model.embed_tokens.weight"}, "the vocabulary is padded"
    for table in tables:
        placed = sum(item.once for item in target_coverage(table))
        assert placed < sum(source.elements for source in table.sources), "each rank takes its share"


def test_a_hundred_traces_leave_server_and_model_as_they_were(endpoint: SglangEndpoint) -> None:
    server_checks.assert_undisturbed(endpoint, TRACES)


def test_q_without_k_and_v_is_a_part_of_its_target(endpoint: SglangEndpoint) -> None:
    """The negative control of coverage: what is not sent is seen not to be written."""
    some = tuple(item for item in server_checks.sources(endpoint) if "k_proj" not in item.name)
    problems = coverage_problems(server_checks.traced(endpoint, some), {}, receiver="here")
    assert {(item.kind, item.subject) for item in problems} == {
        ("uncovered", f"model.layers.{layer}.self_attn.qkv_proj.weight") for layer in (0, 1)
    }


def test_a_lane_s_plan_is_proven(
    tiny_server: RunningServer, tiny_folder: Path, trainer_of: Callable[[Path], Any]
) -> None:
    assert "coverage proven: " in plan_of(tiny_server, trainer_of(tiny_folder).model)


def test_garbage_and_too_much_are_answered_and_the_server_lives_on(endpoint: SglangEndpoint) -> None:
    channel, facts = endpoint._channel, endpoint.facts()
    for message, told in (
        (b"\xc1garbage", "could not be read"),
        (bytes(MOST_REQUEST_BYTES + 1), f"{MOST_REQUEST_BYTES + 1} bytes"),
    ):
        answers = carry(channel, facts, message, loader=LOADER, timeout_seconds=120)
        for answer in answers:
            reply: LoaderReply = decode(answer or b"", LoaderReply, sender="the server")
            assert isinstance(reply, Failure)
            assert told in reply.what
    assert endpoint.generate(server_checks.PROMPTS[:1], max_tokens=2)


def post(endpoint: SglangEndpoint, token: str) -> None:
    """A request for our loader whose answer is to go where `token` says."""
    body = f'{{"load_format":"{LOADER}","flush_cache":false,"abort_all_requests":false}}'
    bucket = EncodedBucket([(token, torch.zeros(3, dtype=torch.uint8))])
    length, pieces = request_body(bucket, field=PAYLOAD_FIELD, copies=2, body=body)
    endpoint._channel.send("POST", UPDATE_ROUTE, timeout_seconds=60, body=pieces, length=length)


@pytest.mark.parametrize("token", ["../escaped", "/tmp/escaped", "0" * 32])  # noqa: S108 - it must not be
def test_an_answer_goes_to_no_other_place(
    endpoint: SglangEndpoint, tiny_server: RunningServer, run_folder: Path, token: str
) -> None:
    with exchange():  # so that the run folder is there
        before = sorted(run_folder.parent.rglob("*"))
        told = tiny_server.log.read_text().count("was not answered")
        post(endpoint, token)
        assert sorted(run_folder.parent.rglob("*")) == before
    assert tiny_server.log.read_text().count("was not answered") == told + 2, "each rank says why"
    assert endpoint.generate(server_checks.PROMPTS[:1], max_tokens=2)


@contextmanager
def bad_run_folder(run_folder: Path, kind: str) -> Iterator[Path]:
    """The run folder as a link, or open to all; the folder that a careless writer would write in."""
    with exchange():
        pass
    if kind == "open":
        run_folder.chmod(0o777)
        yield run_folder
        run_folder.chmod(0o700)
        return
    elsewhere = run_folder.with_name("elsewhere")
    run_folder.rename(elsewhere)
    run_folder.symlink_to(elsewhere)
    yield elsewhere
    run_folder.unlink()
    elsewhere.rename(run_folder)


@pytest.mark.parametrize("kind", ["link", "open"])
def test_neither_side_uses_a_run_folder_that_others_may_control(
    endpoint: SglangEndpoint, run_folder: Path, kind: str
) -> None:
    with bad_run_folder(run_folder, kind) as folder:
        with pytest.raises(EngineError, match="cannot hold a server's answers"):
            endpoint.trace_workers(server_checks.sources(endpoint), 60)
        token = "ab" * 16
        (folder / token).mkdir(mode=0o700)
        post(endpoint, token)
        assert list((folder / token).iterdir()) == []
        (folder / token).rmdir()
    assert server_checks.traced(endpoint)


def test_a_server_that_answers_in_another_folder_is_untraced(
    endpoint: SglangEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTLANE_RUN_FOLDER", str(tmp_path / "run"))
    untraced = endpoint.trace_workers(server_checks.sources(endpoint), 60)
    assert isinstance(untraced, Untraced)
    assert str(tmp_path / "run") in untraced.reason
    assert list((tmp_path / "run").iterdir()) == []


def checkpoint_of(folder: Path) -> dict[str, torch.Tensor]:
    """Its tensors under their own names: a mixture's module holds its experts in another layout."""
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("version", "ranks"), [("0.5.18", 2), pytest.param("0.5.23", 1, marks=pytest.mark.long_run)]
)
def test_a_mixture_of_experts_is_proven_and_synced(
    start_server: Any,
    open_server: Callable[[RunningServer], SglangEndpoint],
    moe_folder: Path,
    trainer_of: Callable[[Path], Any],
    tmp_path: Path,
    sglang_newer: Path,
    version: str,
    ranks: int,
) -> None:
    newer = sglang_newer if version == "0.5.23" else None
    tensors = checkpoint_of(moe_folder)
    changed = shutil.copytree(moe_folder, tmp_path / "changed")
    with start_server(moe_folder, ranks, newer=newer) as server:
        endpoint = open_server(server)
        assert endpoint.facts().version.startswith(version)
        assert_proven(endpoint, ranks, lora=False)
        with wl.connect(
            trainer=wl.trainer("torch", model=tensors), rollout=[wl.rollout("sglang", url=server.url)]
        ) as lane:
            assert "coverage proven: " in str(lane.plan())
            for sync in (1, 2):
                said = lane.replicas[0].generate(server_checks.PROMPTS, max_tokens=8)
                generator = torch.Generator().manual_seed(sync)
                for tensor in tensors.values():
                    tensor.add_(torch.randn(tensor.shape, generator=generator) * tensor.std() * 0.05)
                save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
                trainer = trainer_of(changed)
                assert trainer.distance(server_checks.PROMPTS, said) >= MOVED
                read_back = lane.sync(version=sync).replicas[0].read_back
                assert len(read_back) == (ranks if sync == 1 else 0)
                given = lane.replicas[0].generate(server_checks.PROMPTS, max_tokens=8)
                assert trainer.distance(server_checks.PROMPTS, given) <= AGREES


def test_experts_that_lora_hides_are_each_named_before_anything_is_sent(
    start_server: Any,
    open_server: Callable[[RunningServer], SglangEndpoint],
    moe_folder: Path,
    lora_arguments: tuple[str, ...],
) -> None:
    with start_server(moe_folder, 1, arguments=lora_arguments) as server:
        endpoint = open_server(server)
        before = server_checks.told_by(endpoint, "checksums")
        assert server_checks.differences_from_the_oracle(endpoint) == [[]], "the table says what is lost"
        with pytest.raises(PlanError) as caught:
            plan_of(server, checkpoint_of(moe_folder))
        assert server_checks.told_by(endpoint, "checksums") == before
    dropped = {item.subject for item in caught.value.problems if item.kind == "unconsumed"}
    assert dropped == {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer, expert, part in itertools.product(range(2), range(4), ("gate", "up", "down"))
    }


@pytest.mark.long_run  # with LoRA on it is in every run
def test_sglang_of_update_sessions_is_proven_without_lora(
    start_server: Any,
    open_server: Callable[[RunningServer], SglangEndpoint],
    tiny_folder: Path,
    sglang_newer: Path,
) -> None:
    with start_server(tiny_folder, 1, newer=sglang_newer) as server:
        assert_proven(open_server(server), 1, lora=False)


def test_sglang_of_update_sessions_with_lora_is_proven_undisturbed_and_synced(
    newer_lora_server: RunningServer,
    open_server: Callable[[RunningServer], SglangEndpoint],
    tiny_folder: Path,
) -> None:
    endpoint = open_server(newer_lora_server)
    assert endpoint.facts().version == "0.5.23"
    assert_proven(endpoint, 1, lora=True)
    server_checks.assert_undisturbed(endpoint, 10)
    with server_checks.traced_beside(endpoint):  # each opens a session of its own, or uses the lane's
        found = run_parity(
            model=tiny_folder,
            engine="sglang",
            url=newer_lora_server.url,
            ranks=2,
            syncs=3,
            seconds=400,
            options={},
            plan_says="coverage proven: ",
        )
    assert [parity.versions for parity in found] == [(sync,) * 3 for sync in (1, 2, 3)]
