"""SGLang on a GPU, fed by another process on it: bits, log-probs and memory, in every mode.

Needs a GPU and an SGLang in the environment of the tests; `sglang_over_requests.py` runs the same by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sglang_over_requests.py")
SECONDS = 900


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 120)
def test_every_mode_holds_the_bits_and_says_the_words_of_a_server_started_from_them(tmp_path: Path) -> None:
    words = [sys.executable, str(PROGRAM), str(tmp_path), "--seconds", str(SECONDS)]
    subprocess.run(words, check=False, timeout=SECONDS + 60)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "errors" not in figures, figures["errors"]
    assert figures["not shown"] == {}
    checks = figures["checks"]
    assert {name: item["told"] for name, item in checks.items() if not item["passed"]} == {}
    for mode in ("full", "merged", "adapter"):
        assert f"{mode}: live tensors bitwise equal" in checks
        assert f"{mode}: ten counted syncs leave GPU memory where it was" in checks
    assert "adapter: lora tensors bitwise equal" in checks
    assert "memory: a release frees the weights" in checks
