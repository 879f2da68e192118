#!/usr/bin/env python3
"""Writes `WAYS.md` anew; with `--tests` prints each way with the tests that show it instead."""

from __future__ import annotations

import sys

from collected_ways import LONG, TABLE, collected
from live_ways import table


def main() -> None:
    every_run, long_run = collected(), collected(LONG)
    if "--tests" not in sys.argv[1:]:
        TABLE.write_text(table(every_run, long_run))
        return
    for way, tests in sorted(long_run.items()):
        when = "every run" if way in every_run else "long runs"
        words = (way.version, way.place, way.model, f"TP {way.tensor_parallel}", way.mode, way.trainer, when)
        sys.stdout.write(f"{', '.join(words)}\n{''.join(f'    {test}{chr(10)}' for test in tests)}")


if __name__ == "__main__":
    main()
