"""The methods that vLLM's worker gains: `LLM(worker_extension_cls=WORKER_EXTENSION)`.

vLLM imports this module in every worker process before it loads the model, which is where the CPU patch has
to be applied. A message is bytes both ways, so `collective_rpc` needs no insecure serialisation.
"""

from __future__ import annotations

from weightlane_vllm.patches import apply_where_viable

PATCHED = apply_where_viable()


class WeightlaneWorkerExtension:
    """Mixed into the worker class; its names are prefixed, since vLLM refuses any that collides."""

    def weightlane_agent(self, message: bytes) -> bytes:
        """Hands one encoded `AgentRequest` to this worker's agent; gives the encoded reply, never raises."""
        from weightlane.agents import agent_of

        return agent_of(self).handle(message)

    def weightlane_adapters(self, request: bytes = b"") -> bytes:
        """What requests may name now, each loaded: `ServedAdapters` or a `Failure`, encoded; never raises."""
        from weightlane_vllm.served_adapters import tell_served

        return tell_served(self, request)

    def weightlane_sleep(self) -> bytes:
        """What this worker has let go of: `SleepState` or a `Failure`, encoded; never raises."""
        from weightlane_vllm.sleep_calls import tell_sleep

        return tell_sleep(self)
