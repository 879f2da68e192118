"""Whoever plans, decodes or discovers does not pay for torch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LIGHT = (
    "weightlane.registry, weightlane.messages, weightlane.plan, weightlane.planning, weightlane.verify, "
    "weightlane.plan_check, weightlane.manifest, weightlane.buckets, weightlane.control, weightlane.agent, "
    "weightlane.replica_session, weightlane.moving, weightlane.transports.sink, "
    "weightlane.torch_trainer.plugin"
)
HEAVY = ("torch", "transformers", "peft", "vllm", "sglang")


def loaded_by(modules: str, *, first_on_path: str = "") -> set[str]:
    program = (
        f"import sys\nsys.path[:0] = {[first_on_path] if first_on_path else []!r}\nimport {modules}\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    )
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_contract_modules_load_nothing_heavy() -> None:
    assert loaded_by(LIGHT) == set()


def test_the_check_above_sees_torch(tmp_path: Path) -> None:
    # A stand-in, since the real one takes seconds to load.
    (tmp_path / "torch.py").touch()
    assert loaded_by(f"{LIGHT}, torch", first_on_path=str(tmp_path)) == {"torch"}
