"""Stored tables come back as they were, from files of one's own alone; anything else is traced again."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from packing_engine import WIRES, FakePackingEngine

from weightlane.errors import ProtocolError
from weightlane.trace.built_from import BuiltFrom
from weightlane.trace.store import TableStore, TableStoreWarning, user_folder

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.trace.table import PlacementTable


ABOUT = BuiltFrom("acme", "1", "acme/acme@any", 2, False, "f", "m", "t", "s", "h")


@pytest.fixture(scope="module")
def tables() -> tuple[PlacementTable, ...]:
    return tuple(FakePackingEngine(worker, 2).trace(WIRES) for worker in (0, 1))


@pytest.fixture
def store(tmp_path: Path) -> TableStore:
    return TableStore(tmp_path / "tables")


def test_tables_come_back_as_they_were(store: TableStore, tables: tuple[PlacementTable, ...]) -> None:
    assert store.get(ABOUT, WIRES) is None
    store.put(ABOUT, tables)
    assert store.get(ABOUT, WIRES) == tables
    again = tuple(replace(table, seconds=9.0) for table in tables)
    store.put(ABOUT, again)
    assert store.get(ABOUT, WIRES) == again


@pytest.mark.parametrize("field", BuiltFrom.__struct_fields__)
def test_whatever_a_trace_rests_on_has_tables_of_its_own(
    store: TableStore, tables: tuple[PlacementTable, ...], field: str
) -> None:
    store.put(ABOUT, tables)
    other = {"tensor_parallel": 4, "lora": True}.get(field, "other")
    assert store.get(replace(ABOUT, **{field: other}), WIRES) is None
    assert store.get(ABOUT, WIRES) == tables


def test_files_are_private(store: TableStore, tables: tuple[PlacementTable, ...], tmp_path: Path) -> None:
    path = store.put(ABOUT, tables)
    assert path == store.path_of(ABOUT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tables").stat().st_mode) == 0o700
    assert list((tmp_path / "tables").iterdir()) == [path]


def test_a_folder_that_others_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ProtocolError, match="not a private folder"):
        TableStore(tmp_path / "open")


def test_the_users_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/you")
    assert str(user_folder({"XDG_CACHE_HOME": "/cache"})) == "/cache/weightlane/tables"
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "not/absolute"}):
        assert str(user_folder(environ)) == "/home/you/.cache/weightlane/tables"


def test_those_written_first_go_where_there_are_too_many(
    store: TableStore, tables: tuple[PlacementTable, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane.trace.store._MOST_KEPT", 2)
    kept = [replace(ABOUT, model=str(number)) for number in range(4)]
    for age, about in enumerate(kept):
        os.utime(store.put(about, tables), ns=(age, age))
    store.put(kept[3], tables)
    assert [store.get(about, WIRES) is not None for about in kept] == [False, False, True, True]


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
def test_a_damaged_file_is_ignored_with_a_warning(
    store: TableStore, tables: tuple[PlacementTable, ...], damage: str
) -> None:
    path = store.put(ABOUT, tables)
    data = path.read_bytes()
    # "k_proj" becomes "j_proj" everywhere: it still reads as tables.
    changed = data.replace(b"k_proj", b"j_proj")
    path.write_bytes({"cut": data[:-5], "changed": changed, "empty": b"", "text": b"hello"}[damage])
    with pytest.warns(TableStoreWarning, match=path.name):
        assert store.get(ABOUT, WIRES) is None
    store.put(ABOUT, tables)
    assert store.get(ABOUT, WIRES) == tables


def test_tables_under_another_name_are_ignored(store: TableStore, tables: tuple[PlacementTable, ...]) -> None:
    store.put(replace(ABOUT, lora=True), tables).rename(store.path_of(ABOUT))
    with pytest.warns(TableStoreWarning, match="not about BuiltFrom"):
        assert store.get(ABOUT, WIRES) is None


def test_tables_of_some_workers_or_of_other_tensors_are_ignored(
    store: TableStore, tables: tuple[PlacementTable, ...]
) -> None:
    store.put(ABOUT, tables[:1])
    with pytest.warns(TableStoreWarning, match="worker 0 of 2"):
        assert store.get(ABOUT, WIRES) is None
    store.put(ABOUT, tables)
    with pytest.warns(TableStoreWarning, match="nobody asked for"):
        assert store.get(ABOUT, WIRES[1:]) is None


@pytest.mark.parametrize("what", ["link", "readable", "pipe"])
def test_a_file_that_somebody_else_could_have_made_is_ignored(
    store: TableStore, tables: tuple[PlacementTable, ...], tmp_path: Path, what: str
) -> None:
    path = store.put(ABOUT, tables)
    if what == "readable":
        path.chmod(0o644)
    elif what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    with pytest.warns(TableStoreWarning):
        assert store.get(ABOUT, WIRES) is None
