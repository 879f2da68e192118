"""vLLM on a GPU, fed by another process on it: bits, log-probs and memory, in every mode.

Needs a GPU and a vLLM in the environment of the tests; `vllm_over_cuda_ipc.py` runs the same by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("vllm_over_cuda_ipc.py")
SECONDS = 1500


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 60)
def test_every_mode_holds_the_bits_and_says_the_words_of_an_engine_started_from_them(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PROGRAM), str(tmp_path)], check=False, timeout=SECONDS)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "errors" not in figures, figures["errors"]
    checks = figures["checks"]
    assert {name: item["told"] for name, item in checks.items() if not item["passed"]} == {}
    for mode in ("full", "merged", "adapter"):
        assert f"{mode}: live tensors bitwise equal" in checks
        assert f"{mode}: ten syncs leave GPU memory where it was" in checks
