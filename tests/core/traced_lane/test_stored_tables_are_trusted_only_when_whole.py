"""A stored table comes back as it was, from files of one's own alone; anything else is traced again."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from packing_engine import WIRES, FakePackingEngine

from weightlane.errors import ProtocolError
from weightlane.trace.store import TableStore, TableStoreWarning

if TYPE_CHECKING:
    from pathlib import Path

    from weightlane.trace.table import PlacementTable


@pytest.fixture(scope="module")
def table() -> PlacementTable:
    return FakePackingEngine().trace(WIRES)


@pytest.fixture
def store(tmp_path: Path) -> TableStore:
    return TableStore(tmp_path / "tables")


def test_a_table_comes_back_as_it_was(store: TableStore, table: PlacementTable) -> None:
    assert store.get(table.key, WIRES) is None
    store.put(table)
    assert store.get(table.key, WIRES) == table
    assert store.get(table.key, tuple(reversed(WIRES))) == table
    again = replace(table, seconds=9.0)
    store.put(again)
    assert store.get(table.key, WIRES) == again


@pytest.mark.parametrize(
    "change", [{"worker": 1}, {"engine_version": "2"}, {"lora": True}, {"tensor_parallel": 2}], ids=str
)
def test_another_engine_or_worker_has_another_table(
    store: TableStore, table: PlacementTable, change: dict[str, object]
) -> None:
    store.put(table)
    assert store.get(replace(table.key, **change), WIRES) is None
    assert store.get(table.key, WIRES[1:]) is None
    assert store.get(table.key, (replace(WIRES[0], dtype="bfloat16"), *WIRES[1:])) is None


def test_files_are_private(store: TableStore, table: PlacementTable, tmp_path: Path) -> None:
    path = store.put(table)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tables").stat().st_mode) == 0o700
    assert list((tmp_path / "tables").iterdir()) == [path]


def test_a_folder_that_others_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ProtocolError, match="not a private folder"):
        TableStore(tmp_path / "open")


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "text"])
def test_a_damaged_file_is_ignored_with_a_warning(
    store: TableStore, table: PlacementTable, damage: str
) -> None:
    path = store.put(table)
    data = path.read_bytes()
    # "k_proj" becomes "j_proj" everywhere: it still reads as a table.
    changed = data.replace(b"k_proj", b"j_proj")
    path.write_bytes({"cut": data[:-5], "changed": changed, "empty": b"", "text": b"hello"}[damage])
    with pytest.warns(TableStoreWarning, match=path.name):
        assert store.get(table.key, WIRES) is None
    store.put(table)
    assert store.get(table.key, WIRES) == table


def test_a_table_under_another_ones_name_is_ignored(store: TableStore, table: PlacementTable) -> None:
    other = replace(table, key=replace(table.key, worker=1))
    store.put(other).rename(store.put(table))
    with pytest.warns(TableStoreWarning, match="not of TableKey"):
        assert store.get(table.key, WIRES) is None


@pytest.mark.parametrize("what", ["link", "readable", "pipe"])
def test_a_file_that_somebody_else_could_have_made_is_ignored(
    store: TableStore, table: PlacementTable, tmp_path: Path, what: str
) -> None:
    path = store.put(table)
    if what == "readable":
        path.chmod(0o644)
    elif what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    with pytest.warns(TableStoreWarning):
        assert store.get(table.key, WIRES) is None
