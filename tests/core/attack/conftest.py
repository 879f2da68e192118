"""Makes the helpers of these tests, and those of the folders beside, importable."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for name in ("attack", "adapter", "agent", "messages", "ring"):
    sys.path.insert(0, str(HERE.parent / name))
