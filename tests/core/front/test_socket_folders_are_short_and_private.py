"""A deep temporary folder does not keep an engine's front from having a socket."""

from __future__ import annotations

import socket
import stat
import tempfile
from typing import TYPE_CHECKING

import pytest

from weightlane.front.address import parse_address
from weightlane.front.socket_folder import socket_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("depth", [0, 12])
def test_a_socket_fits_however_deep_the_temporary_folder_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, depth: int
) -> None:
    deep = tmp_path.joinpath(*["a-folder-of-a-test"] * depth)
    deep.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with socket_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        address = parse_address(f"unix:{folder}/engine.sock")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address.path)
    assert not folder.exists()
