"""A front in a process of its own, over an engine that only sleeps, answers and fails as it is told."""

from __future__ import annotations

import subprocess
import sys
import time

from weightlane import failures, messages
from weightlane.errors import EngineError, SyncError
from weightlane.facts import EngineFacts
from weightlane.front.server import serve_front


class FakeEngine:
    def facts(self) -> EngineFacts:
        return EngineFacts(engine="fake", version="1.0", source="worker")

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        request: messages.AgentRequest = messages.decode(message, messages.AgentRequest, sender="test")
        if isinstance(request, messages.Detach) and request.lane == "slow":
            time.sleep(30.0)
        if isinstance(request, messages.Describe):
            refusal = failures.failure_of(EngineError(f"no backend {request.backend}"), origin="worker 0")
            return [messages.encode(refusal)]
        return [messages.encode(messages.Done(0)), messages.encode(messages.Done(1))]

    def call(self, route: str, timeout_seconds: float) -> str:
        if route == "boom":
            raise ValueError("the engine's own words")
        if route == "typed":
            raise SyncError("what happened.", "why it did.", "how to mend it.")
        if route == "not text":
            return b"\xff".decode(errors="surrogateescape")
        if route == "child":
            return str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
        return route

    def generate(self, request: messages.Generate) -> messages.Generations:
        return messages.Generations(
            tuple(messages.Generation(prompt[: request.max_tokens], (-0.5,), 7) for prompt in request.prompts)
        )

    def shutdown(self) -> None:
        print("engine shut down", flush=True)


if __name__ == "__main__":
    if "fail" in sys.argv:
        print("loading weights", flush=True)
        raise SystemExit("the model does not fit")
    if "hang" in sys.argv:
        print("still loading", flush=True)
        time.sleep(60)
    serve_front(FakeEngine(), sys.argv[1])
