"""Whatever bytes arrive: the message that was sent, or a ProtocolError that says what is wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane import messages as m
from weightlane.buckets import lay_out_buckets
from weightlane.errors import ProtocolError
from weightlane.facts import EngineFacts
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription

WIRES = (m.WireTensor("a", (2, 3), "bfloat16"), m.WireTensor("b", (), "float32"))
PLAN = m.ReceivePlan("lane-1", "d1", "acme", "shm", WIRES, lay_out_buckets(WIRES), ring={0: "/x", 3: "/y"})
DESCRIPTION = WorkerDescription(
    worker=1,
    workers=2,
    host="h",
    process_id=7,
    incarnation="i",
    live=(LiveTensor("x", (1,), "int8"),),
    expected=(ExpectedTensor("y", (2, 0), tied_to="z"),),
    packed={"qkv_proj": ("q_proj", "k_proj")},
    facts=EngineFacts("acme", "1", "worker", attributes={"a": True}),
)
REQUESTS: tuple[m.AgentRequest, ...] = (
    m.Describe("acme"),
    m.Attach(PLAN),
    m.Receive("lane-1", "d1", 3, 4, {0: "i", 1: "j"}, 5.0, 6.5),
    m.BeginInline("lane-1", "d1", 3, 4, {0: "i"}),
    m.LoadInline("lane-1", 3, 0, b"\x00\xff"),
    m.FinishInline("lane-1", 3),
    m.Publish("lane-1", 3, 4),
    m.Cancel("lane-1", 3, "because"),
    m.Detach("lane-1"),
    m.CheckResidency("lane-1", "d1", {0: "i"}),
    m.ReceiveDisk("lane-1", "d1", 3, 4, {0: "i"}, "sync-3-version-4", "0123"),
)
REPLIES: tuple[m.AgentReply, ...] = (
    m.Described(DESCRIPTION),
    m.Done(1),
    m.ReceiveReport(1, 3, 4, 2, 16, 2, "0123", 0.5, 0.25),
    m.Failure("SyncError", "what"),
)
FRONT: tuple[m.FrontRequest, ...] = (
    m.GetFacts(),
    m.CallWorkers(b"x", 1.0),
    m.CallEngine("pause"),
    m.Generate(((1, 2), ()), 4),
    m.Shutdown(),
)
EVERY: list[tuple[Any, Any]] = (
    [(message, m.AgentRequest) for message in REQUESTS]
    + [(message, m.AgentReply) for message in REPLIES]
    + [(message, m.FrontRequest) for message in FRONT]
)
each_message = pytest.mark.parametrize(("message", "union"), EVERY, ids=lambda item: type(item).__name__)


def decode(data: bytes, union: Any) -> Any:
    return m.decode(data, union, sender="the far side")


@each_message
def test_what_is_sent_is_what_arrives(message: Any, union: Any) -> None:
    assert decode(m.encode(message), union) == message


@each_message
def test_every_truncation_is_told(message: Any, union: Any) -> None:
    data = m.encode(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError, match=rf"{length} bytes from the far side"):
            decode(data[:length], union)


@each_message
def test_an_unknown_field_is_named(message: Any, union: Any) -> None:
    fields = msgspec.msgpack.decode(m.encode(message)) | {"flush_cache": True}
    with pytest.raises(ProtocolError, match="flush_cache"):
        decode(msgspec.msgpack.encode(fields), union)


@each_message
def test_a_missing_field_is_named(message: Any, union: Any) -> None:
    fields = msgspec.msgpack.decode(m.encode(message))
    required = {f.encode_name for f in msgspec.structs.fields(message) if f.required}
    for name in required:
        with pytest.raises(ProtocolError, match=name):
            decode(msgspec.msgpack.encode({key: fields[key] for key in fields if key != name}), union)


@each_message
def test_an_unknown_tag_is_named(message: Any, union: Any) -> None:
    fields = msgspec.msgpack.decode(m.encode(message)) | {"type": "exec-pickle"}
    with pytest.raises(ProtocolError, match="exec-pickle"):
        decode(msgspec.msgpack.encode(fields), union)


def test_a_message_of_another_union_is_named() -> None:
    with pytest.raises(ProtocolError, match="done"):
        decode(m.encode(m.Done(0)), m.AgentRequest)


def test_a_field_of_another_type_is_named() -> None:
    fields = msgspec.msgpack.decode(m.encode(REQUESTS[6])) | {"version": "4"}
    with pytest.raises(ProtocolError, match=r"Expected `int`, got `str`.*version"):
        decode(msgspec.msgpack.encode(fields), m.AgentRequest)


def test_an_unknown_field_deep_inside_is_named() -> None:
    fields = msgspec.msgpack.decode(m.encode(m.Attach(PLAN)))
    fields["plan"]["buckets"][0]["entries"][0]["stride"] = 4
    with pytest.raises(ProtocolError, match="stride"):
        decode(msgspec.msgpack.encode(fields), m.AgentRequest)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, m.AgentRequest)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_one_changed_byte_is_another_message_or_a_protocol_error(pair: tuple[Any, Any], data: Any) -> None:
    message, union = pair
    raw = bytearray(m.encode(message))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(raw), union)
    except ProtocolError:
        return
    assert isinstance(decoded, msgspec.Struct)


@pytest.mark.parametrize("data", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000], ids=["arrays", "maps"])
def test_deep_nesting_is_no_recursion_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, m.AgentRequest)
