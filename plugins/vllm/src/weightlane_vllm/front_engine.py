"""A live `LLM` or `AsyncLLM` behind a front, or in the caller's own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from weightlane import failures, messages
from weightlane.errors import EngineError
from weightlane.generation_lengths import require_lengths
from weightlane_vllm.engine_calls import AGENT_METHOD, Asked
from weightlane_vllm.facts import SAMPLE_VERSIONS, WEIGHT_VERSION
from weightlane_vllm.opened_engine import WORKER_EXTENSION_CLASS, calls_on
from weightlane_vllm.requests import RESET_PREFIX_CACHE

if TYPE_CHECKING:
    from weightlane.adapters import AdapterRef
    from weightlane.facts import EngineFacts

__all__ = ["WORKER_EXTENSION_CLASS", "LlmFrontEngine"]

_GENERATE_SECONDS = 600.0
_VERSION_SECONDS = 60.0
_SHUTDOWN_SECONDS = 20.0


class _Kind(msgspec.Struct, frozen=True):
    """The tag of an agent message and, of a publish, its version; a payload is skipped, not copied."""

    type: str
    version: int = 0


class LlmFrontEngine:
    """A `FrontEngine` over a vLLM `LLM` or `AsyncLLM` that was started with our worker extension.

    Args:
        llm: the engine, alive.
        backend: the name under which its workers find this plugin.
        start_seconds: bound on the first question to the workers.

    Raises:
        EngineError: the engine has no worker extension of ours, or a worker's agent refuses to answer.
    """

    def __init__(self, llm: Any, *, backend: str, start_seconds: float) -> None:
        self._calls = calls_on(llm)
        self._published: int | None = None
        facts = None
        for reply in self.call_workers(messages.encode(messages.Describe(backend)), start_seconds):
            answer: messages.AgentReply = messages.decode(reply, messages.AgentReply, sender="a worker")
            if isinstance(answer, failures.Failure):
                raise failures.error_of(answer)
            if not isinstance(answer, messages.Described):
                raise EngineError(f"A worker answered describe with {type(answer).__name__}.")
            described = answer.description
            facts = facts or described.facts
            self._calls.watch(
                described.process_id, f"worker {described.worker} (process {described.process_id})"
            )
        if facts is None:
            raise EngineError("No worker of the engine told facts of itself.")
        self._facts = facts

    def facts(self) -> EngineFacts:
        """As the workers told them at the start; raises EngineDeadError once a process has ended."""
        self._calls.require_alive()
        return self._facts

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        """One encoded reply per worker, in rank order; a publish that all accept also labels the engine."""
        kind = msgspec.msgpack.decode(message, type=_Kind)
        replies: list[bytes] = self._calls.collective_rpc(
            kind.type, AGENT_METHOD, (message,), timeout_seconds
        )
        if kind.type == "publish" and all(_kind(reply) != "failure" for reply in replies):
            self._label(kind.version)
        return replies

    def call(self, route: str, timeout_seconds: float) -> str:
        """`reset_prefix_cache` is the one call that this era makes."""
        if route != RESET_PREFIX_CACHE:
            raise EngineError(
                f"Backend vllm has no call {route!r}.", f"It has {RESET_PREFIX_CACHE}.", "Connect again."
            )
        if not self._calls.reset_prefix_cache(timeout_seconds):
            raise EngineError(
                "vLLM did not reset its prefix cache.",
                "Blocks of running requests are still in use, so later prompts could meet keys and values of "
                "the old weights.",
                "Sync when no request runs.",
            )
        return "reset"

    def generate(self, request: messages.Generate) -> messages.Generations:
        """Continuations of token-id prompts; log-probs are of the model's own distribution, natural log.

        Raises:
            EngineError: a continuation has not `max_tokens` tokens, the request names an adapter that is not
                served, or none while adapters are.
        """

        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            logprobs=0,  # of the chosen token alone
            seed=request.seed,
            ignore_eos=True,  # the contract asks for exactly max_tokens
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        asked = Asked(prompts, parameters, self._adapter_asked(request.adapter))
        answered = self._calls.generate(asked, _GENERATE_SECONDS)
        generations = tuple(
            self._generation(output.outputs[0], answered.adapter) for output in answered.outputs
        )
        require_lengths(generations, request.max_tokens, engine="vLLM")
        return messages.Generations(generations)

    def shutdown(self) -> None:
        """Ends the engine; processes of it that do not end by themselves are killed."""
        self._calls.shutdown(_SHUTDOWN_SECONDS)

    def detach(self) -> None:
        """Lets go of an engine that somebody else owns."""
        self._calls.detach()

    def _adapter_asked(self, name: str) -> str | None:
        if self._facts.launch_arguments.get("enable_lora") == "true":
            return name
        if name:
            raise EngineError(
                f"A request to vLLM names adapter {name!r}.",
                "The engine was started without LoRA.",
                "Leave it out, or start the engine with --enable-lora.",
            )
        return None

    def _label(self, version: int) -> None:
        if self._facts.attributes.get(WEIGHT_VERSION):
            self._calls.set_weight_version(str(version), _VERSION_SECONDS)
        self._published = version

    def _generation(self, completion: Any, adapter: AdapterRef | None) -> messages.Generation:
        tokens = tuple(int(token) for token in completion.token_ids)
        logprobs = tuple(
            float(choices[token].logprob) for token, choices in zip(tokens, completion.logprobs, strict=True)
        )
        # vLLM has one label for all of its weights, and several adapters may be served.
        version = adapter.version if adapter else self._version_of(completion)
        return messages.Generation(tokens, logprobs, version)

    def _version_of(self, completion: Any) -> int | None:
        """The engine's own label of these tokens; where an engine keeps none, what we last published."""
        if not self._facts.attributes.get(SAMPLE_VERSIONS):
            return self._published
        labels = [span.version for span in completion.weight_versions or ()]
        if self._published is not None and labels != [str(self._published)]:
            raise EngineError(
                f"A generation is labelled {', '.join(labels) or 'with no version'} by vLLM.",
                f"Version {self._published} is what was published.",
                "Let nobody else set the engine's weight version.",
            )
        return self._published


def _kind(reply: bytes) -> str:
    return msgspec.msgpack.decode(reply, type=_Kind).type
