"""A live `LLM` or `AsyncLLM` behind a front, or in the caller's own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from weightlane import failures, messages
from weightlane.errors import EngineError
from weightlane.generation_lengths import require_lengths
from weightlane_vllm.engine_calls import ADAPTERS_METHOD, AGENT_METHOD, Asked, Made
from weightlane_vllm.facts import ENCODES, KV_CACHE_ALONE, PAUSES, SAMPLE_VERSIONS, WEIGHT_VERSION
from weightlane_vllm.opened_engine import WORKER_EXTENSION_CLASS, calls_on
from weightlane_vllm.routes import Routes
from weightlane_vllm.served_adapters import agreed
from weightlane_vllm.sleep_calls import EngineMemory

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts
    from weightlane_vllm.adapter_turnover import AdapterTurnover

__all__ = ["WORKER_EXTENSION_CLASS", "LlmFrontEngine"]

_SYNC_STARTS = frozenset({"receive", "begin-inline", "receive-disk"})
_ADAPTERS_CHANGE = frozenset({"receive", "receive-disk", "finish-inline", "publish", "cancel", "detach"})
_GENERATE_SECONDS = 600.0
_VERSION_SECONDS = 60.0
_ASK_SECONDS = 60.0
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
        self._turnover: AdapterTurnover | None = None
        self._guards = False
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
        self._facts = self._with_own_facts(facts)
        self._turnover = self._make_turnover(start_seconds)
        self._guards = self._turnover is None and self._adapter_asked("") is not None
        if self._guards:
            self._admit_served(start_seconds)
        self._sleeps = facts.launch_arguments.get("enable_sleep_mode") == "true"
        self._memory = EngineMemory(self._calls, cache_alone=facts.attributes.get(KV_CACHE_ALONE, False))
        self._routes = Routes(self._calls, self._turnover, self._memory)

    def facts(self) -> EngineFacts:
        """As the workers told them at the start; raises EngineDeadError once a process has ended."""
        self._calls.require_alive()
        return self._facts

    def call_workers(self, message: bytes, timeout_seconds: float) -> list[bytes]:
        """One encoded reply per worker, in rank order; a publish that all accept also labels the engine."""
        kind = msgspec.msgpack.decode(message, type=_Kind)
        publishes = kind.type == "publish"
        if kind.type in _SYNC_STARTS:
            self._calls.require_idle(timeout_seconds)
        if self._turnover and publishes:
            self._turnover.before_publish(timeout_seconds)
        elif self._turnover and kind.type in _SYNC_STARTS:
            self._turnover.release_idle(timeout_seconds)
        renews = publishes and self._guards
        rpc = self._calls.publishing_rpc if renews else self._calls.collective_rpc
        replies: list[bytes] = rpc(kind.type, AGENT_METHOD, (message,), timeout_seconds)
        if self._guards and kind.type in _ADAPTERS_CHANGE:
            self._admit_served(timeout_seconds)
        if publishes and all(_kind(reply) != "failure" for reply in replies):
            if self._turnover:
                self._turnover.after_publish(timeout_seconds)
            self._label(kind.version)
        return replies

    def call(self, route: str, timeout_seconds: float) -> str:
        """One of `weightlane_vllm.routes`."""
        return self._routes.call(route, timeout_seconds)

    def generate(self, request: messages.Generate) -> messages.Generations:
        """Continuations of token-id prompts; log-probs are of the model's own distribution, natural log.

        Raises:
            EngineError: a continuation has not `max_tokens` tokens, the request names an adapter that is not
                served, or none while adapters are.
            NotServableError: the engine sleeps, or has lost its weights to a sleep.
        """
        if self._sleeps:
            self._memory.require_awake(_ASK_SECONDS)
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
        generations = tuple(self._generation(made) for made in self._calls.generate(asked, _GENERATE_SECONDS))
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

    def _with_own_facts(self, facts: EngineFacts) -> EngineFacts:
        """What the workers told, and what only the process that drives the engine can tell."""
        own = {
            PAUSES: bool(self._calls.pause_modes),
            ENCODES: bool(self._calls.config.model_config.is_multimodal_model),
        }
        return msgspec.structs.replace(facts, attributes={**facts.attributes, **own})

    def _make_turnover(self, seconds: float) -> AdapterTurnover | None:
        from weightlane_vllm.async_llm_calls import AsyncLlmCalls

        if not isinstance(self._calls, AsyncLlmCalls) or self._adapter_asked("") is None:
            return None
        from weightlane_vllm.adapter_turnover import AdapterTurnover

        return AdapterTurnover(self._calls, seconds)

    def _admit_served(self, seconds: float) -> None:
        """Requests to an `LLM` that name an adapter which its workers do not all serve are refused."""
        answers = self._calls.collective_rpc("adapters", ADAPTERS_METHOD, (), seconds)
        try:
            served = [ref.name for ref in agreed(answers).adapters]
        except EngineError:
            served = []  # the sync that left them so tells it; generations through us ask again
        self._calls.admit_adapters(served, seconds)

    def _label(self, version: int) -> None:
        """Labels what is sampled, unless requests run on: each names the version of its adapter by itself."""
        if self._turnover and self._turnover.publishes_beside:
            return
        if self._facts.attributes.get(WEIGHT_VERSION):
            self._calls.set_weight_version(str(version), _VERSION_SECONDS)
        self._calls.published(version, _VERSION_SECONDS)

    def _generation(self, made: Made) -> messages.Generation:
        completion = made.output.outputs[0]
        tokens = tuple(int(token) for token in completion.token_ids)
        logprobs = tuple(
            float(choices[token].logprob) for token, choices in zip(tokens, completion.logprobs, strict=True)
        )
        # vLLM has one label for all of its weights, and several adapters may be served.
        version = made.adapter.version if made.adapter else self._version_of(completion, made.version)
        return messages.Generation(tokens, logprobs, version)

    def _version_of(self, completion: Any, published: int | None) -> int | None:
        """The engine's own label of these tokens; where an engine keeps none, what was published then."""
        if not self._facts.attributes.get(SAMPLE_VERSIONS):
            return published
        labels = [span.version for span in completion.weight_versions or ()]
        if published is not None and labels != [str(published)]:
            raise EngineError(
                f"A generation is labelled {', '.join(labels) or 'with no version'} by vLLM.",
                f"Version {published} is what was published.",
                "Let nobody else set the engine's weight version.",
            )
        return published


def _kind(reply: bytes) -> str:
    return msgspec.msgpack.decode(reply, type=_Kind).type
