"""The loader as SGLang's scheduler calls it: a table or why there is none, and never an exception."""

from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightlane.failures import Failure
from weightlane.messages import WireTensor, decode, encode
from weightlane.trace.coverage import coverage_problems
from weightlane_sglang import loader_answers
from weightlane_sglang.loader_messages import (
    ElementsHashed,
    HashElements,
    LoaderReply,
    Released,
    TellReleased,
    Traced,
    TraceLoad,
)
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE, exchange
from weightlane_sglang.weight_loader import answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

TENSORS = (WireTensor("q.weight", (4, 3), "bfloat16"), WireTensor("k.weight", (2, 3), "float32"))


class PackingModel(torch.nn.Module):
    """Packs q and k into one parameter, as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.randn(6, 3), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q.weight":
                self.qk[:4].copy_(tensor)
            elif name == "k.weight":
                self.qk[4:].copy_(tensor)


@pytest.fixture(autouse=True)
def fake_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What of SGLang the loader asks inside a scheduler; gives the run folder."""
    sizes = SimpleNamespace(tp_rank=1, tp_size=2, pp_size=1, moe_ep_size=1)
    context = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: sizes  # type: ignore[attr-defined]
    context.get_server_args = lambda: SimpleNamespace(enable_lora=True)  # type: ignore[attr-defined]
    engine = types.ModuleType("sglang")
    engine.__version__ = "0.5.18"  # type: ignore[attr-defined]
    for name, module in (
        ("sglang", engine),
        ("sglang.srt", types.ModuleType("sglang.srt")),
        ("sglang.srt.runtime_context", context),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    folder = tmp_path / "run"
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
    return folder


def in_bytes(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def asked(model: Any, tensor: Any) -> LoaderReply:
    with exchange() as answers:
        answer(model, [(answers.token, tensor)])
        (_, written) = answers.answers(2, within_seconds=0)
        assert written is not None, "rank 1 answers, and in its own file"
        reply: LoaderReply = decode(written, LoaderReply, sender="the loader")
        return reply


def test_a_rank_tells_where_each_tensor_lands_and_its_model_stays_as_it_was() -> None:
    model = PackingModel()
    parameter, before, address = model.qk, model.qk.clone(), model.qk.data_ptr()
    reply = asked(model, in_bytes(encode(TraceLoad(TENSORS))))
    assert isinstance(reply, Traced)
    assert coverage_problems([reply.table], {}, receiver="here") == []
    assert reply.table.targets_of() == {"q.weight": ("qk",), "k.weight": ("qk",)}
    key = reply.table.key
    assert (key.engine, key.engine_version, key.architecture) == ("sglang", "0.5.18", "PackingModel")
    assert (key.worker, key.workers, key.tensor_parallel, key.lora) == (1, 2, 2, True)
    assert model.qk is parameter
    assert model.qk.data_ptr() == address
    assert torch.equal(model.qk, before)


def test_a_scheduler_before_0_5_14_tells_its_layout_by_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", None)
    groups = types.ModuleType("sglang.srt.distributed.parallel_state")
    for name, number in (
        ("get_tensor_model_parallel_rank", 1),
        ("get_tensor_model_parallel_world_size", 2),
        ("get_moe_expert_parallel_world_size", 1),
    ):
        setattr(groups, name, lambda number=number: number)
    groups.get_pp_group = lambda: SimpleNamespace(world_size=1)  # type: ignore[attr-defined]
    holder = types.ModuleType("sglang.srt.distributed")
    holder.parallel_state = groups  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", holder)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", groups)
    reply = asked(PackingModel(), in_bytes(encode(TraceLoad(TENSORS))))
    assert isinstance(reply, Traced)
    key = reply.table.key
    assert (key.worker, key.workers, key.pipeline_parallel, key.lora) == (1, 2, 1, False)

    class Wrapped(torch.nn.Module):
        __module__ = "sglang.srt.lora.layers"

    model = PackingModel()
    model.wrapped = Wrapped()
    reply = asked(model, in_bytes(encode(TraceLoad(TENSORS))))
    assert isinstance(reply, Traced)
    assert reply.table.key.lora


class FakeUpdater:
    """The part of a scheduler that calls a loader and keeps tags."""

    def __init__(self, tags: Any) -> None:
        self.offload_tags = tags

    def update(self) -> LoaderReply:
        return asked(PackingModel(), in_bytes(encode(TellReleased())))


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ({"weights", "kv_cache"}, ("kv_cache", "weights")),
        (set(), ()),
        ("another thing of this name", None),
    ],
)
def test_a_rank_tells_what_the_scheduler_around_it_has_released(
    tags: Any, told: tuple[str, ...] | None
) -> None:
    assert FakeUpdater(tags).update() == Released(told)


def test_a_rank_hashes_what_it_holds_by_a_table_that_it_gave() -> None:
    model = PackingModel()
    traced = asked(model, in_bytes(encode(TraceLoad(TENSORS))))
    assert isinstance(traced, Traced)
    request = HashElements(("", traced.table.digest()))
    first, again = (asked(model, in_bytes(encode(request))) for _ in range(2))
    assert isinstance(first, ElementsHashed)
    assert first == again
    assert len(first.hashes.placements) == 2
    model.qk.data[5, 0] += 1.0
    other = asked(model, in_bytes(encode(request)))
    assert isinstance(other, ElementsHashed)
    same = [a == b for a, b in zip(first.hashes.placements, other.hashes.placements, strict=True)]
    assert same == [True, False]


def test_a_table_that_this_process_has_not_given_is_a_failure() -> None:
    reply = asked(PackingModel(), in_bytes(encode(HashElements(("0" * 16, "1" * 16)))))
    assert isinstance(reply, Failure)
    assert f"does not hold table {'1' * 16}" in reply.what


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (in_bytes(b"\xc1garbage"), "could not be read"),
        (torch.zeros(0, dtype=torch.uint8), "could not be read"),
        (in_bytes(encode(TENSORS[0])), "could not be read"),
        (torch.zeros(4), "not a row of bytes"),
        (torch.zeros((2, 2), dtype=torch.uint8), "not a row of bytes"),
        ("no tensor at all", "not a row of bytes"),
        (in_bytes(encode(TraceLoad((WireTensor("q.weight", (4, 3), "float99"),)))), "float99"),
    ],
)
def test_what_cannot_be_answered_is_told_with_its_reason(tensor: Any, told: str) -> None:
    reply = asked(PackingModel(), tensor)
    assert isinstance(reply, Failure)
    assert told in reply.what
    assert "TP rank 1" in reply.origin


def test_a_request_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_answers, "MOST_REQUEST_BYTES", 100)
    reply = asked(PackingModel(), torch.zeros(101, dtype=torch.uint8))
    assert isinstance(reply, Failure)
    assert "101 bytes" in reply.what


def test_a_loader_of_the_engine_that_raises_is_part_of_the_table() -> None:
    class Raising(PackingModel):
        def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
            raise KeyError("no such layer")

    reply = asked(Raising(), in_bytes(encode(TraceLoad(TENSORS))))
    assert isinstance(reply, Traced)
    assert [item.kind for item in reply.table.obstacles] == ["error"]


@pytest.mark.parametrize(
    "named_tensors",
    [None, [], 7, [("../../x", torch.zeros(1, dtype=torch.uint8))], [("a", 1), ("b", 2)], [(3, 4)], ["ab"]],
)
def test_what_names_no_exchange_is_told_in_the_log_alone(
    fake_scheduler: Path, caplog: pytest.LogCaptureFixture, named_tensors: Any
) -> None:
    fake_scheduler.mkdir(mode=0o700)
    with caplog.at_level(logging.ERROR):
        answer(PackingModel(), named_tensors)
    assert "was not answered" in caplog.text
    assert [item.name for item in fake_scheduler.parent.rglob("*")] == ["run"]


def test_a_run_folder_that_others_may_write_in_gets_no_answer(
    fake_scheduler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with exchange() as answers:
        fake_scheduler.chmod(0o777)
        answer(PackingModel(), [(answers.token, in_bytes(encode(TraceLoad(TENSORS))))])
        assert "mode 0777" in caplog.text
        assert answers.answers(2, within_seconds=0) == (None, None)


def test_code_of_ours_that_cannot_be_imported_does_not_end_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "weightlane_sglang.loader_answers", None)
    answer(PackingModel(), [("0" * 32, in_bytes(b"x"))])
    assert "ModuleNotFoundError" in caplog.text
