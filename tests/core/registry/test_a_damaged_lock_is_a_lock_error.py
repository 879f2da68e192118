"""A lock file, damaged in fields or bytes: it is read, or it is a LockError, and never a silent choice."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from damage import ODD_JSON, damaged_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightlane import lock_check
from weightlane.errors import LockError
from weightlane.facts import EngineFacts
from weightlane.lock_file import Lock, LockedBackend, read_lock, write_lock_file
from weightlane.lock_writing import lock_of
from weightlane.selection import select

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import FakeSite

FACTS = EngineFacts(engine="acme", version="1.5", source="worker")
WHOLE = Lock(
    weightlane="0.1.0",
    backends=tuple(
        LockedBackend(
            role=role,
            engine="acme",
            backend="acme",
            era="only",
            distribution="acme-lane",
            version="1.0",
            entry_point="acme",
            engine_version="1.5",
            evidence=("it fits", "it has it"),
        )
        for role in ("trainer", "rollout")
    ),
)
fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weightlane.lock"
    write_lock_file(WHOLE, path)
    return path


@fuzz
@given(seed=st.integers(0, 1 << 32))
def test_it_is_read_or_is_a_lock_error_and_what_was_read_can_be_written(seed: int, path: Path) -> None:
    random = Random(seed)
    whole = msgspec.json.format(msgspec.json.encode(WHOLE), indent=2)
    for _ in range(5):
        path.write_bytes(damaged_json(whole, random))
        try:
            found = read_lock(path)
        except LockError as error:
            assert "is no lock that weightlane can read" in str(error)  # noqa: PT017 - most are errors, not all
            continue
        assert isinstance(found, Lock)
        write_lock_file(found, path)
        assert read_lock(path) == found
        assert len(found.digest) == 12


@fuzz
@given(seed=st.integers(0, 1 << 32))
def test_under_it_the_locked_plugin_is_selected_or_nothing_is(seed: int, locked_site: FakeSite) -> None:
    path = locked_site.folder / "damaged.lock"
    whole = (locked_site.folder / "weightlane.lock").read_bytes()
    path.write_bytes(damaged_json(whole, Random(seed)))
    try:
        selected = select(locked_site.load().under_lock(path), "rollout", "acme", FACTS)
    except LockError:
        return
    (row,) = (row for row in read_lock(path).backends if (row.role, row.engine) == ("rollout", "acme"))
    assert (row.distribution, row.version, row.era) == (selected.distribution, selected.version, "only")


@pytest.fixture
def locked_site(site: FakeSite) -> FakeSite:
    site.plugin("acme-lane", site.source(), entry="acme")
    registry = site.load()
    select(registry, "rollout", "acme", FACTS)
    write_lock_file(lock_of(registry.locks.selections()), site.folder / "weightlane.lock")
    return site


def test_every_truncation_is_told(path: Path) -> None:
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(LockError, match="is no lock that weightlane can read"):
            read_lock(path)


def test_every_missing_or_retyped_field_is_named(path: Path) -> None:
    fields = msgspec.json.decode(path.read_bytes())
    optional = {"format", "engine_version", "evidence"}
    for part in (fields, fields["backends"][1]):
        for name in tuple(part):
            kept = part.pop(name)
            if name not in optional:
                path.write_bytes(msgspec.json.encode(fields))
                with pytest.raises(LockError, match=f"missing required field `{name}`"):
                    read_lock(path)
            part[name] = [[{}]]
            path.write_bytes(msgspec.json.encode(fields))
            with pytest.raises(LockError, match=rf"Expected.*{name}"):
                read_lock(path)
            part[name] = kept


@pytest.mark.parametrize("data", ODD_JSON, ids=lambda data: ascii(data[:8]))
def test_what_is_no_lock_at_all_is_told(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(LockError, match="is no lock that weightlane can read"):
        read_lock(path)


def test_damage_is_mostly_seen(path: Path) -> None:
    # The control of the tests above: a reader that took anything would pass them as well.
    random, whole, refused = Random(0), path.read_bytes(), 0
    for _ in range(200):
        path.write_bytes(damaged_json(whole, random))
        try:
            read_lock(path)
        except LockError:
            refused += 1
    assert refused > 0.5 * 200


def test_without_the_comparison_a_damaged_lock_would_let_another_version_pass(
    locked_site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = locked_site.folder / "weightlane.lock"
    path.write_bytes(path.read_bytes().replace(b'"version": "1.0"', b'"version": "1.1"'))
    with pytest.raises(LockError, match=r"the lock names acme-lane 1\.1, here is acme-lane 1\.0"):
        select(locked_site.load().under_lock(path), "rollout", "acme", FACTS)
    monkeypatch.setattr(lock_check, "_compared", lambda row, found: [])
    assert select(locked_site.load().under_lock(path), "rollout", "acme", FACTS).version == "1.0"
