"""Importing weightlane, finding plugins and listing backends load neither torch nor an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weightlane

HEAVY = ["torch", "transformers", "vllm", "sglang", "megatron", "ray", "peft"]


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    tell = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    command = [sys.executable, "-W", "ignore", "-c", f"{code}\n{tell}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_check_itself_sees_a_heavy_module() -> None:
    assert "torch" in modules_after("import torch")


@pytest.mark.parametrize(
    "code",
    [
        "import weightlane",
        "import weightlane; weightlane.errors.PlanError",
        "import weightlane.registry, weightlane.selection",
        "from weightlane.registry import get_registry; assert get_registry().backends()",
        "from weightlane.registry import get_registry; get_registry().collect_facts('torch')",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert not modules_after(code) & set(HEAVY)


def test_importing_weightlane_loads_no_torch_by_importtime() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import weightlane"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "weightlane" in done.stderr
    assert "torch" not in done.stderr


def test_listing_backends_loads_nothing_heavy_and_no_command_line_parser() -> None:
    code = "from weightlane.cli import main; assert main(['backends']) == 0"
    assert not modules_after(code) & {*HEAVY, "typer", "rich", "pydantic"}


def test_the_benchmark_of_listing_measures_and_judges() -> None:
    """How long listing takes is for `benchmarks/listing.py` to show, where nothing else runs."""
    script = Path(__file__).parents[3] / "benchmarks" / "listing.py"
    command = [sys.executable, str(script), "--runs", "1", "--json", "--limit"]
    done = subprocess.run([*command, "1e6"], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["best_ms"] > 0
    assert subprocess.run([*command, "0"], capture_output=True, check=False, timeout=60).returncode == 1


def test_the_public_names_are_fetched_on_first_use() -> None:
    import weightlane.lane

    assert weightlane.connect is weightlane.lane.connect
    assert weightlane.errors.PlanError.__module__ == "weightlane.errors"
    assert set(weightlane.__all__) <= set(dir(weightlane))
    for name in weightlane.__all__:
        assert getattr(weightlane, name) is not None


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        weightlane.conect  # noqa: B018


def test_the_benchmark_of_discovery_measures_what_it_says() -> None:
    """Its figures are for people; that it makes 20 plugins, one broken, and sees what is heavy is for us."""
    script = Path(__file__).parents[3] / "benchmarks" / "discovery.py"
    command = [sys.executable, str(script), "--runs", "1", "--json", "--limit"]
    done = subprocess.run([*command, "1e6"], capture_output=True, text=True, check=True, timeout=60)
    figures = json.loads(done.stdout)
    assert (figures["plugins"], figures["broken"], figures["heavy_modules"]) == (20, 1, [])
    assert 0 < figures["load_best_ms"] <= figures["load_median_ms"]
    assert subprocess.run([*command, "0"], capture_output=True, check=False, timeout=60).returncode == 1
