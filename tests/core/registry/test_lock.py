"""Locks: what they hold, what they refuse, and that a file which cannot be trusted is not used."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import weightlane.lock_check
import weightlane.registry
from weightlane import write_lock
from weightlane.errors import LockError, SelectionError
from weightlane.facts import EngineFacts
from weightlane.lock_file import Lock, LockedBackend, read_lock, write_lock_file
from weightlane.lock_writing import lock_of
from weightlane.selection import select

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import FakeSite

    from weightlane.registry import Registry

FACTS = EngineFacts(engine="acme", version="1.5", source="worker")


@pytest.fixture
def lock_path(site: FakeSite) -> Path:
    """A lock of acme-lane 1.0, in force through the environment."""
    site.plugin("acme-lane", site.source(), entry="acme")
    registry = site.load()
    select(registry, "rollout", "acme", FACTS)
    path = site.folder / "weightlane.lock"
    write_lock_file(lock_of(registry.locks.selections()), path)
    site.environ["WEIGHTLANE_LOCKED"] = str(path)
    return path


def changed(path: Path, **fields: Any) -> None:
    """Writes the lock anew with other fields in each row."""
    lock = read_lock(path)
    rows = tuple(msgspec.structs.replace(row, **fields) for row in lock.backends)
    write_lock_file(msgspec.structs.replace(lock, backends=rows), path)


def select_acme(registry: Registry, version: str = "1.5") -> Any:
    return select(registry, "rollout", "acme", msgspec.structs.replace(FACTS, version=version))


# -- what it holds ----------------------------------------------------------------------------------------


def test_a_lock_names_distribution_version_entry_point_era_and_evidence(lock_path: Path) -> None:
    (row,) = read_lock(lock_path).backends
    assert (row.role, row.engine, row.backend, row.era) == ("rollout", "acme", "acme", "only")
    assert (row.distribution, row.version, row.entry_point) == ("acme-lane", "1.0", "acme")
    assert row.engine_version == "1.5"
    assert "acme 1.5 (as the live worker says) fits acme <2,>=1" in row.evidence


def test_a_process_writes_what_it_selected(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plugin("acme-lane", site.source())
    registry = site.load()
    monkeypatch.setattr(weightlane.registry, "_process_registry", registry)
    path = site.folder / "run.lock"
    with pytest.raises(LockError, match="nothing to lock"):
        write_lock(path)
    for _ in range(2):  # two replicas are one row
        select_acme(registry)
    assert write_lock(path) == read_lock(path)
    assert [row.distribution for row in read_lock(path).backends] == ["acme-lane"]


def test_two_replicas_of_different_versions_are_two_rows_and_both_are_allowed(site: FakeSite) -> None:
    more = """
    @hookimpl
    def weightlane_register_backends():
        return [BackendDescriptor(
            name="acme", role="rollout", engine="acme", era=era, versions=SpecifierSet(versions),
            distributions=("acme-engine",), probe=always_viable, capabilities=frozenset(),
        ) for era, versions in (("old", "<2"), ("new", ">=2"))]
    """
    site.plugin("acme-lane", site.source(more=more))
    registry = site.load()
    for version in ("1.5", "2.5"):
        select_acme(registry, version)
    path = site.folder / "weightlane.lock"
    write_lock_file(lock_of(registry.locks.selections()), path)
    held = registry.under_lock(path)
    assert [select_acme(held, version).descriptor.era for version in ("1.5", "2.5")] == ["old", "new"]


# -- what it refuses --------------------------------------------------------------------------------------


def test_what_the_lock_names_is_selected(site: FakeSite, lock_path: Path) -> None:
    selected = select_acme(site.load())
    assert (selected.distribution, selected.notes) == ("acme-lane", ())


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"distribution": "other-lane"}, "distribution: the lock names other-lane, here is acme-lane"),
        ({"distribution": "other-lane"}, "the lock names other-lane 1.0, here is none of it"),
        ({"version": "0.9"}, "version: the lock names acme-lane 0.9, here is acme-lane 1.0"),
        ({"entry_point": "fast"}, "entry point: the lock names fast, here is acme"),
        ({"era": "older"}, "era: the lock names older, here is only"),
        ({"backend": "acme2"}, "backend: the lock names acme2, here is acme"),
        (
            {"engine": "other"},
            "backend: the lock names none for this engine, here is acme (only) of acme-lane 1.0",
        ),
        ({"role": "trainer"}, "rollout acme: backend: the lock names none for this engine"),
    ],
)
def test_anything_else_is_refused_with_the_evidence(
    site: FakeSite, lock_path: Path, fields: dict[str, Any], difference: str
) -> None:
    changed(lock_path, **fields)
    with pytest.raises(LockError) as caught:
        select_acme(site.load())
    assert difference in str(caught.value)
    assert "was chosen here on: acme 1.5 (as the live worker says)" in str(caught.value)
    assert "WEIGHTLANE_LOCKED" in str(caught.value)


def test_without_the_lock_the_same_selection_stands(site: FakeSite, lock_path: Path) -> None:
    changed(lock_path, version="0.9")
    del site.environ["WEIGHTLANE_LOCKED"]
    assert select_acme(site.load()).distribution == "acme-lane"


def test_every_difference_is_in_one_error(
    site: FakeSite, lock_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("other-lane", site.source(engine="other"))
    other = LockedBackend(
        role="rollout",
        engine="other",
        backend="other",
        era="older",
        distribution="other-lane",
        version="2.0",
        entry_point="other-lane",
    )
    changed(lock_path, version="0.9", era="older")
    lock = read_lock(lock_path)
    write_lock_file(msgspec.structs.replace(lock, backends=(*lock.backends, other)), lock_path)
    monkeypatch.setattr(weightlane.lock_check, "__version__", "9.9")
    with pytest.raises(LockError, match="in 5 places") as caught:
        select_acme(site.load())
    for difference in (
        "weightlane: version: the lock names 0.1.0, here is 9.9",
        "rollout acme: version: the lock names acme-lane 0.9",
        "rollout acme: era: the lock names older",
        "rollout other: version: the lock names other-lane 2.0, here is other-lane 1.0",
        "rollout other: era: the lock names older, here is only",
    ):
        assert difference in str(caught.value)


def test_a_new_rival_is_refused_although_selection_prefers_it(site: FakeSite, lock_path: Path) -> None:
    rival = site.source().replace("capabilities=", "priority=9, capabilities=")
    site.plugin("rival-lane", rival, version="3.0")
    with pytest.raises(LockError, match=r"the lock names acme-lane 1.0, here is rival-lane 3.0"):
        select_acme(site.load())
    assert select_acme(site.load().without_lock()).distribution == "rival-lane"


def test_a_locked_plugin_that_is_gone_is_named_although_nothing_can_be_selected(
    site: FakeSite, lock_path: Path
) -> None:
    site.remove("acme-lane")
    with pytest.raises(LockError, match=r"the lock names acme-lane 1.0, here is none of it") as caught:
        select_acme(site.load())
    assert isinstance(caught.value.__cause__, SelectionError)


@pytest.mark.filterwarnings("ignore::weightlane.notices.PluginWarning")
def test_a_locked_plugin_that_is_broken_is_named_with_its_state(site: FakeSite, lock_path: Path) -> None:
    (site.folder / "fake_acme_lane.py").write_text("raise ImportError('no libacme.so')")
    site.forget_modules()
    with pytest.raises(LockError, match=r"acme of acme-lane 1.0 is broken: .*no libacme.so"):
        select_acme(site.load())


def test_an_engine_that_no_locked_plugin_fits_keeps_its_own_error(site: FakeSite, lock_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"it serves acme <2,>=1 and found acme 3.0") as caught:
        select_acme(site.load(), "3.0")
    assert not isinstance(caught.value, LockError)


def test_another_version_of_the_engine_is_a_note_since_plugins_are_what_is_locked(
    site: FakeSite, lock_path: Path
) -> None:
    (note,) = select_acme(site.load(), "1.6").notes
    assert "was written with acme 1.5; here is 1.6" in note


def test_a_backend_that_another_process_chose_is_held_to_the_lock_too(
    site: FakeSite, lock_path: Path
) -> None:
    assert site.load().backend_named("acme-lane/acme@only") is not None
    changed(lock_path, version="0.9")
    with pytest.raises(LockError, match=r"the lock names acme-lane 0.9"):
        site.load().backend_named("acme-lane/acme@only")


def test_a_lock_by_argument_goes_before_that_of_the_environment(site: FakeSite, lock_path: Path) -> None:
    good = site.folder / "good.lock"
    write_lock_file(read_lock(lock_path), good)
    changed(lock_path, version="0.9")
    registry = site.load()
    with pytest.raises(LockError):
        select_acme(registry)
    assert select_acme(registry.under_lock(good)).distribution == "acme-lane"


# -- the file ---------------------------------------------------------------------------------------------


def test_a_lock_is_written_for_its_owner_alone_and_replaces_an_older_one(lock_path: Path) -> None:
    assert stat.S_IMODE(lock_path.stat().st_mode) == 0o600
    changed(lock_path, version="2.0")
    assert read_lock(lock_path).backends[0].version == "2.0"
    assert [item.name for item in lock_path.parent.iterdir() if "weightlane.lock" in item.name] == [
        "weightlane.lock"
    ]


@pytest.mark.parametrize("place", ["nowhere/weightlane.lock", "file", "link", ".", "fifo"])
def test_a_lock_is_not_written_where_something_else_is(site: FakeSite, place: str) -> None:
    (site.folder / "file").write_text("print('somebody needs this')")
    (site.folder / "link").symlink_to(site.folder / "file")
    os.mkfifo(site.folder / "fifo")
    row = LockedBackend(
        role="rollout", engine="a", backend="a", era="a", distribution="a", version="1", entry_point="a"
    )
    with pytest.raises(LockError, match="cannot be written"):
        write_lock_file(Lock(weightlane="1", backends=(row,)), site.folder / place)
    assert (site.folder / "file").read_text() == "print('somebody needs this')"


def spoil_field(path: Path) -> None:
    path.write_text(path.read_text().replace('"era"', '"aera"'))


def spoil_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def more_fields(path: Path) -> None:
    path.write_text(path.read_text().replace('"era"', '"wheel": "x", "era"'))


def make_large(path: Path) -> None:
    path.write_text(" " * (1 << 20) + path.read_text())


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (spoil_field, "aera"),
        (more_fields, "unknown field `wheel`"),
        (spoil_format, "Invalid enum value 2"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "no lock that weightlane can read"),
        (lambda path: path.write_text(""), "no lock that weightlane can read"),
        (lambda path: path.chmod(0o666), r"Everybody may write to it \(mode 0666\)"),
        (lambda path: path.unlink(), "cannot be opened. No such file"),
        (make_large, "more than any lock"),
        (make_pipe, "It is not a plain file"),
    ],
)
def test_a_lock_that_cannot_be_trusted_is_an_error(
    site: FakeSite, lock_path: Path, spoil: Callable[[Path], object], error: str
) -> None:
    select_acme(site.load())
    spoil(lock_path)
    with pytest.raises(LockError, match=error):
        select_acme(site.load())
