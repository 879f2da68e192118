"""A whole lane into a fake server of two ranks that let our loader in: what they hold is compared."""

from __future__ import annotations

import base64
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

import weightlane as wl
from weightlane.checkpoint import expected_tensors_of_config
from weightlane.errors import ProtocolError, VerificationError
from weightlane.failures import failure_of
from weightlane.messages import decode, encode
from weightlane.trace.live_hashes import live_hashes
from weightlane.trace.table import TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_load
from weightlane_sglang.contract import (
    BEGIN_UPDATE_ROUTE,
    CONTINUE_ROUTE,
    END_UPDATE_ROUTE,
    PAUSE_ROUTE,
    UPDATE_REQUEST,
    UPDATE_ROUTE,
    VERSION_ROUTE,
)
from weightlane_sglang.loader_messages import ElementsHashed, HashElements, LoaderRequest, Traced
from weightlane_sglang.loader_name import LOADER
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE, write_answer
from weightlane_sglang.tables_held import TablesHeld

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weightlane.lane import Lane

FLUSH = "/flush_cache?timeout=30"
SYNC_ROUTES = (
    PAUSE_ROUTE, UPDATE_ROUTE, FLUSH, VERSION_ROUTE, CONTINUE_ROUTE, BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE,
)  # fmt: skip
CHANGED = "model.layers.0.mlp.up_proj.weight"


class FakeRank(torch.nn.Module):
    """One half of every tensor."""

    def __init__(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.number = number
        self.held = TablesHeld()
        for name, tensor in tensors.items():
            half = torch.zeros_like(tensor[: len(tensor) // 2])
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(half, requires_grad=False))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.of(name).copy_(tensor.chunk(2)[self.number])

    def of(self, name: str) -> torch.nn.Parameter:
        parameter: torch.nn.Parameter = getattr(self, name.replace(".", "_"))
        return parameter

    def reply(self, request: Any) -> bytes:
        live = dict(self.named_parameters())
        if isinstance(request, HashElements):
            try:
                table = self.held.of_rank(request.tables, self.number, self)
            except ProtocolError as error:
                return encode(failure_of(error, origin=f"rank {self.number}"))
            return encode(ElementsHashed(live_hashes(table, live)))
        sources = [TracedSource(item.name, item.name, item.shape, item.dtype) for item in request.tensors]
        key = TableKey("sglang", "0.5.18", "Fake", self.number, 2, 2)
        table = trace_load(Receiver(self, self.load_weights, key), sources, style="plain")
        return encode(Traced(self.held.keep(table, self)))


class FakeRanks:
    """The server's update route: loads what it is sent, or has our loader answer."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.ranks = [FakeRank(number, tensors) for number in range(2)]

    def __call__(self, body: bytes) -> dict[str, Any]:
        fields = json.loads(body)
        for rank, payload in zip(self.ranks, fields["serialized_named_tensors"], strict=True):
            named = pickle.loads(base64.b64decode(payload))  # noqa: S301 - our own
            if fields["load_format"] != LOADER:
                rank.load_weights(iter(named))
                continue
            ((token, tensor),) = named
            request: Any = decode(tensor.numpy().tobytes(), LoaderRequest, sender="here")
            write_answer(token, rank.number, rank.reply(request))
        return {"success": True}

    def change_one(self, _: bytes = b"") -> dict[str, bool]:
        """As the answer to a flush: one element of one rank becomes another just after the load."""
        self.ranks[1].of(CHANGED).data[0, 0] += 1.0
        return {"success": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    made = tmp_path_factory.mktemp("model")
    Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=16, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(made)  # fmt: skip
    return made


@pytest.fixture
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        item.name: torch.randn(item.shape, generator=generator) for item in expected_tensors_of_config(folder)
    }


@pytest.fixture
def ranks(
    fake_server: Any,
    answer: Any,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> FakeRanks:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    made = FakeRanks(tensors)
    fake_server.answers.update(dict.fromkeys(SYNC_ROUTES, answer({"success": True})))
    fake_server.answers[UPDATE_ROUTE] = answer(made)
    told = fake_server.answers["/server_info"].body
    fake_server.answers["/server_info"] = answer({**told, "custom_weight_loader": [LOADER]})
    fake_server.answers["/model_info"] = answer(
        {"model_path": str(folder), "weight_version": "default", "architectures": ["Qwen3ForCausalLM"]}
    )
    return made


def connect(server: Any, tensors: dict[str, torch.Tensor], **options: Any) -> Lane:
    lane = wl.connect(
        trainer=wl.trainer("torch", model=tensors),
        rollout=[wl.rollout("sglang", url=server.url)],
        **{"bucket_bytes": 256} | options,
    )
    server.requests.clear()
    return lane


def asked(server: Any) -> list[str]:
    """The routes of a sync, an update for our loader as `read`."""
    return [
        "read" if route == UPDATE_ROUTE and json.loads(body)["load_format"] == LOADER else route
        for _, route, body in server.requests
        if route in SYNC_ROUTES
    ]


def test_the_first_sync_is_read_back_between_the_flush_and_the_version(
    fake_server: Any, ranks: FakeRanks, tensors: dict[str, torch.Tensor]
) -> None:
    elements = sum(tensor.numel() for tensor in tensors.values())
    with connect(fake_server, tensors) as lane:
        assert "rollout 0: read-back (hashes of what it holds) at the first sync" in str(lane.plan())
        (first,) = lane.sync(version=1).replicas
        assert f"{elements:,} elements read back equal on 2" in first.verified
        assert sum(item.elements for item in first.read_back) == elements
        updates = [UPDATE_ROUTE] * len(lane.plan().buckets)
        assert asked(fake_server) == [PAUSE_ROUTE, *updates, FLUSH, "read", VERSION_ROUTE, CONTINUE_ROUTE]
        assert (
            max(len(body) for body in fake_server.bodies(UPDATE_ROUTE)[-1]["serialized_named_tensors"]) < 2000
        )
        fake_server.requests.clear()
        (second,) = lane.sync(version=2).replicas
        assert "read" not in asked(fake_server)
        assert second.read_back == ()


@pytest.mark.requirement("R68", part="full weights")
def test_one_element_that_is_another_fails_the_sync_before_anything_is_published(
    fake_server: Any, answer: Any, ranks: FakeRanks, tensors: dict[str, torch.Tensor]
) -> None:
    with connect(fake_server, tensors) as lane:
        fake_server.answers[FLUSH] = answer(ranks.change_one)
        with pytest.raises(
            VerificationError, match=rf"worker 1 .*model_layers_0_mlp_up_proj_weight \(from {CHANGED}"
        ):
            lane.sync(version=1)
        assert asked(fake_server)[-1] == "read", "neither published nor let go"
        assert lane.published_version is None
        fake_server.answers[FLUSH] = answer({"success": True})
        assert lane.sync(version=2).replicas[0].read_back, "a first sync that failed is not the first"
        assert lane.published_version == 2


def test_without_reading_back_it_passes_unnoticed(
    fake_server: Any, answer: Any, ranks: FakeRanks, tensors: dict[str, torch.Tensor]
) -> None:
    with connect(fake_server, tensors, read_back="never") as lane:
        fake_server.answers[FLUSH] = answer(ranks.change_one)
        (report,) = lane.sync(version=1).replicas
        assert "unavailable" in report.verified
        assert lane.published_version == 1
    assert not torch.equal(ranks.ranks[1].of(CHANGED), tensors[CHANGED].chunk(2)[1])


def test_ranks_that_hold_no_such_table_any_more_do_not_answer_from_another(
    fake_server: Any, ranks: FakeRanks, tensors: dict[str, torch.Tensor]
) -> None:
    with connect(fake_server, tensors, read_back="always") as lane:
        lane.sync(version=1)
        for rank in ranks.ranks:
            rank.held = TablesHeld()
        with pytest.raises(ProtocolError, match="does not hold table"):
            lane.sync(version=2)
        assert lane.published_version == 1


def test_in_the_era_of_sessions_it_is_asked_after_the_session_has_ended(
    fake_server: Any, ranks: FakeRanks, tensors: dict[str, torch.Tensor], answer: Any
) -> None:
    told = fake_server.answers["/server_info"].body
    fake_server.answers["/server_info"] = answer({**told, "version": "0.5.23"})
    document = fake_server.answers["/openapi.json"].body
    for route in (BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE):
        document["paths"][route] = {"post": {}}
    schemas = document["components"]["schemas"]
    del schemas[UPDATE_REQUEST]["properties"]["disable_draft_model"]
    schemas[UPDATE_REQUEST]["properties"]["selector"] = {"type": "string"}
    schemas["BeginWeightUpdateReqInput"] = {"properties": {"selector": {"type": "string"}}}
    with connect(fake_server, tensors, bucket_bytes=1 << 20) as lane:
        assert lane.sync(version=1).replicas[0].read_back
    assert asked(fake_server) == [
        *(PAUSE_ROUTE, BEGIN_UPDATE_ROUTE, UPDATE_ROUTE, END_UPDATE_ROUTE, FLUSH),
        *(BEGIN_UPDATE_ROUTE, "read", END_UPDATE_ROUTE),
        *(VERSION_ROUTE, CONTINUE_ROUTE),
    ]


def test_a_rank_forgets_the_tables_of_a_model_that_was_made_anew(tensors: dict[str, torch.Tensor]) -> None:
    first, second, held = FakeRank(0, tensors), FakeRank(0, tensors), TablesHeld()
    sources = [TracedSource(name, name, tuple(item.shape), "float32") for name, item in tensors.items()]
    table = trace_load(Receiver(first, first.load_weights, TableKey("a", "1", "b")), sources, style="plain")
    held.keep(table, first)
    assert held.of_rank([table.digest()], 0, first) is table
    with pytest.raises(ProtocolError, match=r"TP rank 1 does not hold table .none."):
        held.of_rank([table.digest()], 1, first)
    with pytest.raises(ProtocolError, match="does not hold table"):
        held.of_rank([table.digest()], 0, second)
    for number in range(5):
        held.keep(replace(table, style=str(number)), second)
    with pytest.raises(ProtocolError, match="does not hold table"):
        held.of_rank([replace(table, style="0").digest()], 0, second)
    assert held.of_rank([replace(table, style="1").digest()], 0, second).style == "1"
