"""How long this process takes to find and load 20 plugins, one of them broken.

    python benchmarks/discovery.py [--runs 15] [--json]

Each run is a fresh interpreter, since a module is imported once per process. Of the 20 plugins those that are
installed here count; the others are made in a temporary folder, each a distribution with a module of its own,
and one of them fails to import. What is judged is the median of `Registry().load()`: the search of all that
is installed, the import of every plugin and the questions put to it. The import of weightlane itself is shown
beside it. Exit status 1 when the median is over the limit, a heavy module was loaded, or the plugins are not
as they were made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, entry_points
from pathlib import Path

PLUGINS = 20
LIMIT_MS = 50.0
HEAVY = ("torch", "transformers", "vllm", "sglang", "megatron", "ray", "peft")
BROKEN = "raise ImportError('libfake.so: cannot open shared object file')\n"

PLUGIN = '''
"""A rollout backend of an engine that does not exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.hookspecs import hookimpl
from weightlane.probes import require_attributes
from weightlane.types import BackendDescriptor, Capability, TransportName

if TYPE_CHECKING:
    from weightlane.contexts import EndpointContext, MapNamesContext


def probe(facts):
    return require_attributes(facts, ("Layer.load_weights",))


def backend(era, versions):
    return BackendDescriptor(
        name="fake{number}", role="rollout", engine="fake{number}", era=era, versions=SpecifierSet(versions),
        distributions=("fake-engine-{number}",), probe=probe,
        capabilities=frozenset({{Capability.RECEIVE_FULL, Capability.WORKER_AGENT}}),
        transports=(TransportName.SHM, TransportName.INLINE),
    )


@hookimpl
def weightlane_register_backends():
    return [backend("old", ">=1,<2"), backend("new", ">=2,<3")]


@hookimpl
def weightlane_open_endpoint(context: EndpointContext):
    raise NotImplementedError


@hookimpl
def weightlane_map_names(context: MapNamesContext):
    return ()


@hookimpl
def weightlane_build_requests(context):
    raise NotImplementedError


@hookimpl
def weightlane_worker_agent(context):
    raise NotImplementedError
'''

CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
begin = time.perf_counter()
import weightlane.registry
imported, cpu = time.perf_counter(), time.process_time()
registry = weightlane.registry.Registry(environ={}).load()
loaded, cpu = time.perf_counter(), time.process_time() - cpu
print(json.dumps({
    "import_ms": 1e3 * (imported - begin),
    "load_ms": 1e3 * (loaded - imported),
    "load_cpu_ms": 1e3 * cpu,
    "states": [status.state for status in registry.statuses()],
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
}))
"""


@dataclass(frozen=True)
class Figures:
    """Milliseconds over all runs; `load` is what the limit is about."""

    plugins: int
    broken: int
    distributions: int
    runs: int
    load_median_ms: float
    load_best_ms: float
    load_cpu_median_ms: float
    import_median_ms: float
    heavy_modules: tuple[str, ...]
    limit_ms: float
    within_limit: bool


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        _make_plugins(site, PLUGINS - _installed_plugins())
        runs = [_run(site) for _ in range(options.runs + 1)][1:]  # the first compiles
    figures = _figures(runs, options.limit)
    if options.json:
        print(json.dumps(asdict(figures), indent=2))
    else:
        _show(figures)
    as_made = (figures.plugins, figures.broken) == (PLUGINS, 1)
    return 0 if figures.within_limit and as_made and not figures.heavy_modules else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=15, help="fresh interpreters to measure")
    parser.add_argument("--limit", type=float, default=LIMIT_MS, help="milliseconds that the median may take")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def _installed_plugins() -> int:
    return len(list(entry_points(group="weightlane")))


def _make_plugins(site: Path, count: int) -> None:
    for number in range(count):
        info = site / f"fake_lane_{number}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: fake-lane-{number}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[weightlane]\nfake{number} = fake_lane_{number}\n")
        source = textwrap.dedent(PLUGIN).format(number=number) if number else BROKEN
        (site / f"fake_lane_{number}.py").write_text(source)


def _run(site: Path) -> dict[str, object]:
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(site)]
    # Pins and other choices of this shell are no part of what is measured; paths are. Byte code is kept, as
    # pip leaves it, and beside the plugins, since the shell may forbid it elsewhere.
    apart = ("WEIGHTLANE_", "PYTHONDONTWRITEBYTECODE")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(apart)}
    environ["PYTHONPYCACHEPREFIX"] = str(site / "byte-code")
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, cwd=site, env=environ
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _figures(runs: list[dict[str, object]], limit: float) -> Figures:
    def column(name: str) -> list[float]:
        return [float(str(run[name])) for run in runs]

    states = list(runs[0]["states"])  # type: ignore[call-overload]
    modules = {name for run in runs for name in run["modules"]}  # type: ignore[attr-defined]
    median = statistics.median(column("load_ms"))
    return Figures(
        plugins=len(states),
        broken=states.count("broken"),
        distributions=sum(1 for _ in distributions()),
        runs=len(runs),
        load_median_ms=round(median, 2),
        load_best_ms=round(min(column("load_ms")), 2),
        load_cpu_median_ms=round(statistics.median(column("load_cpu_ms")), 2),
        import_median_ms=round(statistics.median(column("import_ms")), 2),
        heavy_modules=tuple(name for name in HEAVY if name in modules),
        limit_ms=limit,
        within_limit=median <= limit,
    )


def _show(figures: Figures) -> None:
    print(f"{figures.plugins} plugins, {figures.broken} broken, beside {figures.distributions} distributions")
    print(f"discovery          {figures.load_median_ms:7.1f} ms median of {figures.runs} fresh interpreters")
    print(f"                   {figures.load_best_ms:7.1f} ms best")
    print(f"                   {figures.load_cpu_median_ms:7.1f} ms processor time, median")
    print(f"import weightlane  {figures.import_median_ms:7.1f} ms median, not counted")
    print(f"heavy modules      {', '.join(figures.heavy_modules) or 'none'}")
    print(f"{'within' if figures.within_limit else 'OVER'} the limit of {figures.limit_ms:g} ms")


if __name__ == "__main__":
    sys.exit(main())
