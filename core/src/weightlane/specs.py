"""What the user names: the trainer of this rank, and the replicas of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from weightlane.contexts import RolloutTarget
from weightlane.errors import EngineError, ExportError, near_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane.types import BackendDescriptor

DEFAULT_PLACEMENT = "replicated"


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Where weights come from; made by `trainer`."""

    engine: str
    model: Any
    plugin: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def options_for(self, descriptor: BackendDescriptor) -> dict[str, Any]:
        """The options that this backend knows.

        Raises:
            ExportError: an option was given a value of its own and the backend does not know it.
        """
        for name, value in self.options.items():
            if name not in descriptor.options and value != DEFAULT_PLACEMENT:
                near = ", ".join(near_names(name, descriptor.options))
                raise ExportError(
                    f"Trainer backend {descriptor.name} has no option {name!r}.",
                    f"It has: {', '.join(sorted(descriptor.options)) or 'none'}.",
                    f"Use {near}." if near else "Leave it out.",
                )
        return {name: value for name, value in self.options.items() if name in descriptor.options}


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Where weights go; made by `rollout`."""

    target: RolloutTarget
    plugin: str | None = None


def trainer(
    name: str,
    *,
    model: Any,
    placement: Literal["replicated", "partitioned"] = "replicated",
    adapter: str | None = None,
    plugin: str | None = None,
) -> TrainerSpec:
    """Names the trainer of this rank.

    Args:
        name: `torch` (a plain module, a mapping of named tensors, or None on a rank that holds nothing).
        model: this rank's model; tensors are looked up in it afresh at every sync.
        placement: `replicated`: every rank holds every tensor, else the plan is an error. `partitioned`:
            a tensor may live on some ranks only and is broadcast to those that send it.
        adapter: which of a peft model's adapters mode `adapter` sends; None where it has one only.
        plugin: pins the backend to one distribution, as `acme-fsdp` or `acme-fsdp==1.2.*`.
    """
    options = {"placement": placement} if adapter is None else {"placement": placement, "adapter": adapter}
    return TrainerSpec(name, model, plugin, options)


def rollout(
    name: str,
    *,
    url: str = "",
    engine: Any = None,
    model: str = "",
    plugin: str | None = None,
) -> RolloutSpec:
    """Names one replica of a rollout engine; used on the controller (rank 0), ignored elsewhere.

    Args:
        name: `reference`, `vllm` or `sglang`.
        url: `unix:/path` or `tcp:host:port` of a weightlane front beside the engine, or the `http://` URL of
            a server. What an HTTP server is sent may be a format that executes code there (SGLang's wire is
            pickle); it goes to this URL alone.
        engine: an engine object living in this process, such as a `vllm.LLM`, in place of `url`.
        model: the checkpoint folder that the engine was started from, where it cannot tell by itself.
        plugin: pins the backend to one distribution.

    Raises:
        EngineError: both or neither of `url` and `engine` were given.
    """
    if bool(url) == (engine is not None):
        raise EngineError(
            f"rollout({name!r}) needs exactly one of url= and engine=.",
            "An engine is reached at an address or is an object in this process.",
            "Pass one of them.",
        )
    return RolloutSpec(RolloutTarget(name, address=url, handle=engine, model=model), plugin)
