"""weightlane's trainer backend for models that torch shards: FSDP1, FSDP2, HSDP, tensor parallelism, DDP."""

from __future__ import annotations

__version__ = "0.1.0"
