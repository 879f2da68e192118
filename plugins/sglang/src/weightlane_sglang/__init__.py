"""weightlane's rollout backend for SGLang: a server that is reached by its own HTTP requests alone."""

from __future__ import annotations

__version__ = "0.1.0"
