"""weightlane's worker extension with one method more: every worker looks at its own trace."""

from __future__ import annotations

import json
from dataclasses import asdict

import msgspec
from trace_live_models import without_amx_where_experts_fail

from weightlane_vllm.worker_extension import WeightlaneWorkerExtension

without_amx_where_experts_fail()  # in every worker, before its model is made


class TracingExtension(WeightlaneWorkerExtension):
    def traced_here(self, name: str) -> tuple[str, bytes]:
        """What was seen, as JSON, and the table."""
        from observed_trace import observe

        from weightlane_vllm.worker import VllmWorkerEngine

        engine = VllmWorkerEngine(self)
        seen, table = observe(name, engine, self.model_runner.get_model())  # type: ignore[attr-defined]
        return json.dumps(asdict(seen)), msgspec.msgpack.encode(table)
