"""Ways in which a message, or a JSON document, can be wrong: in its fields, and in its bytes."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from random import Random

ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    1 << 24,
    1 << 39,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "\x00",
    "float8_e8m0fnu",
    "int4",
    b"",
    b"\xff" * 70,
    [],
    [[]],
    [-1],
    {},
    {0: "other"},
    {"type": "failure"},
    [[[[[[[[]]]]]]]],
]
ODD_BYTES = [
    b"\xc1",  # never used by msgpack
    b"\xdd\xff\xff\xff\xff",  # an array that claims 4 Gi elements
    b"\xdf\xff\xff\xff\xff",  # a map that claims 4 Gi pairs
    b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    b"\xdb\xff\xff\xff\xff",  # 4 GiB of text
    b"\xa2\xff\xfe",  # text that is no UTF-8
    b"\x81\x80\x00",  # a map as a key
    b"\xcf" + b"\xff" * 8,
    b"\xcb\x7f\xf8" + b"\x00" * 6,  # NaN
    b"\xd6\xff" + b"\xff" * 4,  # a timestamp
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp far away
    b"\x91" * 5000,
]
ODD_JSON = [
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"1e-999",
    b"-0",
    b"0.5",
    b"9" * 5000,
    b'""',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\xff"',
    b'"' + b"x" * 5000 + b'"',
    b"[]",
    b"{}",
    b"[" * 5000,
    b'{"a":' * 5000,
    b'{"":[[]]}',
    b"NaN",
    b"\xef\xbb\xbf",
    b"\x00",
    b"}",
    b"]",
    b",",
    b'"',
]
"""Values of every type, values that no reader of ours knows, and pieces that are no value at all."""

_MEMBER = re.compile(rb'"[^"\\]*"\s*:\s*')


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [
            place for item in value.values() for place in places_in(item)
        ]
    if isinstance(value, list):
        return [(value, i) for i in range(len(value))] + [
            place for item in value for place in places_in(item)
        ]
    return []


def damaged(message: msgspec.Struct, random: Random) -> bytes:
    """The message with something wrong in its fields or in its bytes; rarely, it is whole after all."""
    raw = msgspec.msgpack.encode(message)
    return _with_damaged_bytes(raw, random) if random.random() < 0.4 else _with_damaged_fields(raw, random)


def damaged_json(data: bytes, random: Random) -> bytes:
    """The document with something wrong in its fields or in its bytes; rarely, it is whole after all."""
    what = random.choice(["fields", "fields", "fields", "twice", "value", "bytes"])
    if what == "fields":
        fields = json.loads(data)
        _damage_fields(fields, random)
        return msgspec.json.encode(fields)
    if what == "bytes":
        return _with_damaged_bytes(data, random, ODD_JSON)
    found = random.choice(list(_MEMBER.finditer(data)))
    odd = random.choice(ODD_JSON)
    if what == "twice":  # the same key a second time in one object, before the first or after it
        before = random.random() < 0.5
        return (
            data[: found.start()]
            + (found[0] + odd + b"," + found[0] if before else found[0])
            + data[found.end() :].replace(b",", b"," + (b"" if before else found[0] + odd + b","), 1)
        )
    return data[: found.end()] + odd + data[found.end() :]


def _with_damaged_fields(raw: bytes, random: Random) -> bytes:
    """One to three fields removed, added, doubled or replaced, at any depth."""
    fields: Any = msgspec.msgpack.decode(raw)
    _damage_fields(fields, random)
    return msgspec.msgpack.encode(fields)


def _damage_fields(fields: Any, random: Random) -> None:
    for _ in range(random.randint(1, 3)):
        places = places_in(fields)
        if not places:
            break
        container, key = random.choice(places)
        odd = deepcopy(random.choice(ODD_VALUES))
        what = random.choice(["replace", "replace", "remove", "add", "double", "graft"])
        if what == "remove":
            del container[key]
        elif what == "replace":
            container[key] = odd
        elif what == "add" and isinstance(container, dict):
            container[random.choice(["flush", "", "type", "sync"])] = odd
        elif what == "double" and isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        elif what == "graft":
            other, there = random.choice(places)
            container[key] = deepcopy(other[there]) if other is not container else odd


def _with_damaged_bytes(raw: bytes, random: Random, odd_bytes: list[bytes] = ODD_BYTES) -> bytes:
    """Cut, overwritten, or spliced with what readers of the format stumble over."""
    place = random.randint(0, len(raw))
    odd = random.choice(odd_bytes)
    return random.choice(
        [
            raw[:place],
            raw[:place] + odd + raw[place:],
            raw[:place] + odd + raw[place + len(odd) :],
            raw[:place] + random.randbytes(1) + raw[place + 1 :],
            raw + odd,
            raw + raw,
            random.randbytes(place),
        ]
    )
