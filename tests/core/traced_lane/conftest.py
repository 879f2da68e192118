"""Makes `fake_engine` importable: under importlib mode test folders are not on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
