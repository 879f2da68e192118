"""Makes the helpers of these tests, and those of the folders beside, importable."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "agent", HERE.parent / "messages", HERE.parent / "ring"):
    sys.path.insert(0, str(folder))
