"""The rollout backend for vLLM. Importing this package imports neither torch nor vLLM."""

from __future__ import annotations
