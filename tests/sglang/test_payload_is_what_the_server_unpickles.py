"""The bucket's wire form, read back as the server reads it."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import tracemalloc
from typing import Any

import pytest
import torch

from weightlane.contexts import RolloutTarget
from weightlane.program import RequestMove
from weightlane_sglang.endpoint import SglangEndpoint
from weightlane_sglang.payload import EncodedBucket, compact, request_body

ADMITTED = {"torch._utils _rebuild_tensor_v2", "torch.storage _load_from_bytes", "collections OrderedDict"}


def bucket() -> list[tuple[str, torch.Tensor]]:
    whole = torch.arange(1000.0).view(100, 10)
    return [
        ("view", whole[:, :3]),
        ("half", torch.ones(3, dtype=torch.bfloat16)),
        ("parameter", torch.nn.Parameter(torch.randn(5, 7))),
        ("large", torch.randn(1 << 19)),
        ("empty", torch.empty(0, 4)),
        ("scalar", torch.tensor(3.5)),
    ]


def unpickled(encoded: EncodedBucket) -> list[tuple[str, torch.Tensor]]:
    return pickle.loads(base64.b64decode(b"".join(encoded.pieces), validate=True))  # noqa: S301 - ours


@pytest.mark.requirement("R63")
def test_every_tensor_arrives_plain_equal_and_on_its_own_storage() -> None:
    sent = bucket()
    arrived = unpickled(EncodedBucket(sent))
    assert [name for name, _ in arrived] == [name for name, _ in sent]
    for (_, ours), (name, theirs) in zip(sent, arrived, strict=True):
        assert type(theirs) is torch.Tensor, name
        assert not theirs.requires_grad, name
        assert theirs.dtype == ours.dtype, name
        assert torch.equal(theirs, ours), name
        assert theirs.untyped_storage().nbytes() == ours.numel() * ours.element_size(), name


def test_plain_pickle_of_a_view_would_take_its_whole_storage_along() -> None:
    name, view = bucket()[0]
    arrived = pickle.loads(pickle.dumps([(name, view)]))  # noqa: S301 - ours
    assert arrived[0][1].untyped_storage().nbytes() == 4000, "the control: compact() makes 1200 of it"
    assert compact(view).untyped_storage().nbytes() == 1200


def test_only_globals_that_the_server_admits_are_named() -> None:
    data = base64.b64decode(b"".join(EncodedBucket(bucket()).pieces))
    strings: list[str] = []
    named: set[str] = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(argument)
        elif opcode.name == "STACK_GLOBAL":
            named.add(" ".join(strings[-2:]))
        elif opcode.name == "GLOBAL":
            named.add(argument)
    assert named == ADMITTED


@pytest.mark.requirement("R34", part="by value, on CPU")
def test_peak_memory_is_the_text_and_one_tensor() -> None:
    tensors = [(f"t{number}", torch.randn(1 << 20)) for number in range(8)]  # 4 MiB each
    EncodedBucket(tensors[:1])
    tracemalloc.start()
    encoded = EncodedBucket(tensors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert encoded.nbytes < peak < encoded.nbytes + (6 << 20)


@pytest.mark.parametrize("copies", [1, 2, 8])
@pytest.mark.parametrize("body", ["{}", '{"flush_cache":false,"load_format":null}', ' { "a": [1] }'])
def test_the_body_holds_the_fields_and_one_payload_per_rank(copies: int, body: str) -> None:
    encoded = EncodedBucket(bucket())
    length, pieces = request_body(encoded, field="payload", copies=copies, body=body)
    text = b"".join(pieces)
    assert len(text) == length
    parsed = json.loads(text)
    assert parsed.pop("payload") == [b"".join(encoded.pieces).decode()] * copies
    assert parsed == json.loads(body)


@pytest.mark.requirement("R59")
def test_the_last_bucket_has_the_last_body_and_an_empty_one_is_not_sent(
    fake_server: Any, answer: Any
) -> None:
    fake_server.answers["/update"] = answer({"success": True})
    move = RequestMove("/update", "payload", 2, '{"flush_cache":false}', '{"flush_cache":true}')
    endpoint = SglangEndpoint(RolloutTarget("sglang", address=fake_server.url), timeout_seconds=5)
    endpoint.send_bucket(move, [("a", torch.ones(1))], last=False, version=1)
    endpoint.send_bucket(move, [("b", torch.ones(1))], last=True, version=1)
    endpoint.send_bucket(move, [], last=True, version=1)
    endpoint.close()
    assert [body["flush_cache"] for body in fake_server.bodies("/update")] == [False, True]
    assert [len(body["payload"]) for body in fake_server.bodies("/update")] == [2, 2]
