"""The Megatron trainer backend's place. There is no backend in it yet: it registers nothing."""

from __future__ import annotations

__version__ = "0.1.0"
