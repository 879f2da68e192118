"""vLLM's own weight transfer on a GPU with our backend, and its layerwise reload: bits, words and memory.

Needs a GPU and a vLLM in the environment of the tests; `vllm_weight_transfer.py` runs the same by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("vllm_weight_transfer.py")
SECONDS = 900


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 60)
def test_an_updated_engine_holds_the_bits_and_says_the_words_of_one_started_from_them(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], check=False, timeout=SECONDS)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "errors" not in figures, figures["errors"]
    checks = figures["checks"]
    assert {name: item["told"] for name, item in checks.items() if not item["passed"]} == {}
    for step in ("first update", "after refusals", "reload"):
        assert f"{step}: live tensors bitwise equal" in checks
