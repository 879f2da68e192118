"""Whatever bytes arrive: the message that was sent, or a ProtocolError that says what is wrong with them."""

from __future__ import annotations

import queue
from typing import Any

import msgspec
import pytest
from every_message import DEMO, EVERY, PLAN, TASK
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane import messages as m
from weightlane.demo.messages import Task, line_of, read_rank_message
from weightlane.demo.parent import ParentLine
from weightlane.errors import ProtocolError

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
    fields = msgspec.msgpack.decode(m.encode(m.Publish("lane-1", 3, 4))) | {"version": "4"}
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


# -- the demo's lines ---------------------------------------------------------------------------------------


def read_task(line: bytes) -> Task:
    """As a rank reads it, without the thread that watches standard input."""
    parent = object.__new__(ParentLine)
    parent._tasks = queue.Queue()
    parent._tasks.put(line)
    return parent.task(seconds=1.0)


each_line = pytest.mark.parametrize(
    ("message", "read"),
    [*((message, lambda line: read_rank_message(line, rank=1)) for message in DEMO), (TASK, read_task)],
    ids=lambda item: type(item).__name__,
)


@each_line
def test_a_line_arrives_as_it_was_sent(message: Any, read: Any) -> None:
    assert read(line_of(message)) == message


@each_line
def test_every_truncation_of_a_line_is_told(message: Any, read: Any) -> None:
    line = line_of(message).rstrip()
    for length in range(len(line)):
        with pytest.raises(ProtocolError):
            read(line[:length])


@each_line
def test_a_lines_missing_unknown_or_retyped_field_is_named(message: Any, read: Any) -> None:
    fields = msgspec.json.decode(line_of(message))
    with pytest.raises(ProtocolError, match="flush_cache"):
        read(msgspec.json.encode(fields | {"flush_cache": True}))
    for field in msgspec.structs.fields(message):
        if field.required:
            with pytest.raises(ProtocolError, match=field.encode_name):
                read(msgspec.json.encode({key: fields[key] for key in fields if key != field.encode_name}))
        with pytest.raises(ProtocolError, match=field.encode_name):
            read(msgspec.json.encode(fields | {field.encode_name: [{}]}))
