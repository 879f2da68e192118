"""A version's manifest, damaged in fields or bytes: all of a version is loaded, or a typed error is told."""

from __future__ import annotations

import re
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
import xxhash
from damage import ODD_JSON, damaged_json
from fake_engine import WEIGHTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightlane import errors
from weightlane.errors import ProtocolError, WeightlaneError
from weightlane.failures import Failure
from weightlane.messages import AgentReply, ReceiveReport, decode, encode
from weightlane.transports.disk_manifest import FolderManifest, read_manifest

if TYPE_CHECKING:
    from disk_lane import DiskLane

TYPED = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, WeightlaneError)
}
MANIFEST = "weightlane.json"


def load_with(lane: DiskLane, data: bytes, *, digest: str = "") -> Failure | ReceiveReport:
    """What the worker answers once these bytes are the manifest, of that digest or of the one announced."""
    (lane.latest / MANIFEST).write_bytes(data)
    request = lane.request(manifest_digest=digest) if digest else lane.request()
    reply: AgentReply = decode(lane.agent.handle(encode(request)), AgentReply, sender="the fake")
    assert isinstance(reply, Failure | ReceiveReport)
    return reply


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_what_is_read_of_it_is_a_manifest_or_a_protocol_error(seed: int, lane: DiskLane) -> None:
    random = Random(seed)
    if not lane.written:
        lane.write()
    whole = lane.latest / MANIFEST
    for _ in range(5):
        try:
            found = read_manifest(damaged_json(whole.read_bytes(), random), "the manifest")
        except ProtocolError as error:
            assert str(error).startswith("the manifest ")  # noqa: PT017 - most are errors, not all
            continue
        assert isinstance(found, FolderManifest)
        assert found.encoded()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_a_worker_loads_all_of_it_or_writes_nothing(seed: int, lane: DiskLane) -> None:
    random = Random(seed)
    sync = len(lane.written) + 1
    lane.write(sync, sync)
    whole = (lane.latest / MANIFEST).read_bytes()
    data = damaged_json(whole, random)
    # Half the time the digest that was announced is that of the damage: nothing but the checks of what the
    # manifest says is left then.
    announced = xxhash.xxh3_64_hexdigest(data) if random.random() < 0.5 else ""
    lane.engine.calls.clear()
    served_before = lane.agent.servable
    reply = load_with(lane, data, digest=announced)
    if isinstance(reply, ReceiveReport):
        assert data == whole or announced
        assert all(torch.equal(lane.engine.held[name], WEIGHTS[name]) for name in WEIGHTS)
        lane.publish()
        return
    assert reply.error_type in TYPED, reply.traceback
    if lane.engine.writes:  # a later tensor's own digest is seen when that tensor is read
        assert re.match(r"model\.\w in .* has digest", reply.what)
        assert not lane.agent.servable
    else:
        assert lane.agent.servable == served_before
    lane.sink.abort("the worker refused", sync=sync)


def test_every_truncation_is_told(lane: DiskLane) -> None:
    lane.write()
    whole = (lane.latest / MANIFEST).read_bytes()
    for length in range(len(whole)):
        with pytest.raises(ProtocolError, match="could not be read as a manifest"):
            read_manifest(whole[:length], "the manifest")


def test_every_missing_or_retyped_field_is_named(lane: DiskLane) -> None:
    lane.write()
    fields = msgspec.json.decode((lane.latest / MANIFEST).read_bytes())
    where = [fields, fields["manifest"], fields["manifest"]["tensors"][0], fields["files"][0]]
    where.append(fields["files"][0]["tensors"][0])
    optional = {"aliases", "collective", "adapter", "base", "holders", "trained", "group_backend", "groups"}
    checked = 0
    for part in where:
        for name in tuple(part):
            kept = part.pop(name)
            if name not in optional:
                with pytest.raises(ProtocolError, match=f"missing required field `{name}`"):
                    read_manifest(msgspec.json.encode(fields), "the manifest")
            part[name] = [[{}]]
            with pytest.raises(ProtocolError, match=rf"Expected.*{name}"):
                read_manifest(msgspec.json.encode(fields), "the manifest")
            part[name] = kept
            checked += 1
    assert checked == len(FolderManifest.__struct_fields__) + 10 + 4 + 3 + 5


@pytest.mark.parametrize("data", ODD_JSON, ids=lambda data: ascii(data[:8]))
def test_what_is_no_manifest_at_all_is_told(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="could not be read as a manifest"):
        read_manifest(data, "the manifest")


def test_damage_is_mostly_seen(lane: DiskLane) -> None:
    # The control of the tests above: a reader that took anything would pass them as well.
    lane.write()
    random, whole, refused = Random(0), (lane.latest / MANIFEST).read_bytes(), 0
    for _ in range(200):
        try:
            read_manifest(damaged_json(whole, random), "the manifest")
        except ProtocolError:
            refused += 1
    assert refused > 0.6 * 200
