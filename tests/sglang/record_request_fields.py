#!/usr/bin/env python3
"""Records what requests SGLang wheels list: run by hand, where a new version came out.

    pip download --no-deps --only-binary=:all: -d WHEELS sglang==0.5.24
    python tests/sglang/record_request_fields.py WHEELS/*.whl

writes `data/request_fields/VERSION.json` for each: the routes that a sync can use, and the fields of their
requests, read from the classes without importing them.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec

from weightlane_sglang.contract import (
    DESTROY_GROUP_ROUTE,
    DISTRIBUTED_ROUTE,
    INIT_GROUP_ROUTE,
    MODEL_INFO_ROUTES,
    RELEASE_ROUTE,
    RESUME_ROUTE,
    SERVER_INFO_ROUTES,
    SESSION_ROUTES_USED,
)
from weightlane_sglang.installed import read_sources

FOLDER = Path(__file__).parent / "data" / "request_fields"
_SOURCES = ("sglang/srt/managers/io_struct.py", "sglang/srt/entrypoints/http_server.py")
_ROUTES = {
    *(*SESSION_ROUTES_USED, *MODEL_INFO_ROUTES, *SERVER_INFO_ROUTES, RELEASE_ROUTE, RESUME_ROUTE),
    *(DISTRIBUTED_ROUTE, INIT_GROUP_ROUTE, DESTROY_GROUP_ROUTE),
}


def record(wheel: Path) -> None:
    """Writes the record of one wheel."""
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        for source in _SOURCES:
            archive.extract(source, folder)
        routes, fields = read_sources(Path(folder))
    found = {"routes": sorted(_ROUTES & set(routes)), "request_fields": fields}
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1)
    (FOLDER / f"{version}.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        record(Path(argument))
