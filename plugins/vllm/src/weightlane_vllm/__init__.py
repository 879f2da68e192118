"""The rollout backend for vLLM. Importing this package imports neither torch nor vLLM."""

from __future__ import annotations

__version__ = "0.1.0"
