"""How long `weightlane backends` takes to answer, from the start of its process to its end.

    python benchmarks/listing.py [--runs 15] [--json]

Exit status 1 when the median of the wall times is over the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

LIMIT_MS = 500.0
COMMAND = (sys.executable, "-c", "from weightlane.cli import main; raise SystemExit(main(['backends']))")


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of wall time."""

    runs: int
    median_ms: float
    best_ms: float
    limit_ms: float


def measure(runs: int, limit_ms: float) -> Figures:
    taken = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(COMMAND, stdout=subprocess.DEVNULL, check=True, timeout=60)
        taken.append(1000 * (time.perf_counter() - started))
    return Figures(runs, round(statistics.median(taken), 1), round(min(taken), 1), limit_ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=LIMIT_MS, help="of the median, in milliseconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.runs, arguments.limit)
    if arguments.json:
        print(json.dumps(asdict(figures)))
    else:
        print(
            f"weightlane backends: median {figures.median_ms} ms, best {figures.best_ms} ms "
            f"over {figures.runs} runs (limit of the median {figures.limit_ms:g} ms)"
        )
    return 0 if figures.median_ms <= figures.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
