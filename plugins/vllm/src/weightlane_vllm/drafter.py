"""The model that drafts for a live engine (speculative decoding), and where its weights come from.

Upstream: https://github.com/vllm-project/vllm/blob/main/vllm/config/speculative.py (methods and where each
loads from), `get_draft_model` of the runner (0.26 and newer). A drafter of the `mtp` kind is loaded from the
checkpoint of the model that it drafts for, and so is trained with it. One with a checkpoint of its own is
not, and a sync that wrote the model's tensors into it would ruin it without a word: outputs stay right, since
they are verified, but what it drafts is no longer accepted (https://github.com/radixark/miles/issues/1926).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from weightlane.errors import UsageError
from weightlane.receiver import BeyondExpected
from weightlane_vllm.draft_routes import PREFIX

if TYPE_CHECKING:
    from torch import nn

DRAFTER = "WEIGHTLANE_VLLM_DRAFTER"
"""Environment variable of the engine's process: `auto` (the default) or `keep`."""

DrafterRule: TypeAlias = Literal["without-weights", "follows", "if-exported", "keeps", "unknown"]
"""without-weights: it looks drafts up. follows: it is loaded from the model's own checkpoint, and each sync
writes it. if-exported: it has a checkpoint of its own, and is written where the export has all that it takes.
keeps: it stays as it is. unknown: a proposer class of the user's own, of which nothing is known."""

_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix", "extract_hidden_states"})
_OWN_CLASS = "custom_class"


@dataclass(frozen=True, slots=True)
class DrafterPolicy:
    """What a sync does with the drafter of one engine, as its configuration tells.

    `method` is vLLM's word, `model` what the drafter was loaded from. `unfit` says why plain tensors may not
    be loaded into it ("" where they may).
    """

    method: str
    model: str
    rule: DrafterRule
    unfit: str = ""

    @property
    def kept(self) -> str:
        """Why its tensors need not be written, as it is told of each."""
        why = f", since {self.unfit}" if self.unfit else ""
        return f"the {self.method} drafter keeps its own weights, as loaded from {self.model}{why}"

    @property
    def told(self) -> str:
        """The rule in words, for a plan; "" where there is nothing to say."""
        if self.rule == "follows":
            return (
                f"the {self.method} drafter is loaded from the model's own checkpoint, and each sync of full "
                "weights writes it too"
            )
        if self.rule == "if-exported":
            return f"{self.kept}, unless they are exported as well"
        return self.kept if self.rule == "keeps" else ""


def drafter_policy(vllm_config: Any) -> DrafterPolicy | None:
    """The policy for an engine of this configuration; None where it drafts nothing.

    Raises:
        UsageError: the environment variable has a value that it does not know.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    method = str(speculative.method or "speculative")
    if method in _WITHOUT_WEIGHTS:
        return DrafterPolicy(method, "", "without-weights")
    if method == _OWN_CLASS or speculative.draft_model_config is None:
        return DrafterPolicy(method, str(speculative.model or ""), "unknown")
    model = str(speculative.draft_model_config.model)
    unfit = _unfit(speculative)
    if _wants_kept():
        return DrafterPolicy(method, model, "keeps", f"{DRAFTER}=keep")
    if _is_one_checkpoint(model, vllm_config.model_config):
        return DrafterPolicy(method, model, "follows", unfit)
    return DrafterPolicy(method, model, "keeps" if unfit else "if-exported", unfit)


@dataclass(frozen=True, slots=True)
class Drafter:
    """The policy, and the model where the worker has one in reach."""

    policy: DrafterPolicy
    model: nn.Module | None


def drafter_of(worker: Any) -> Drafter | None:
    """That of a worker; None where its engine drafts nothing."""
    policy = drafter_policy(worker.vllm_config)
    return None if policy is None else Drafter(policy, draft_model_of(worker.model_runner))


def beyond_expected(drafter: Drafter | None) -> BeyondExpected | None:
    """A drafter that takes tensors which the model's checkpoint does not have; None where there is none."""
    if drafter is None or drafter.model is None or drafter.policy.rule not in ("follows", "if-exported"):
        return None
    policy = drafter.policy
    return BeyondExpected(
        f"the {policy.method} drafter ({type(drafter.model).__name__})",
        PREFIX,
        "What stands under draft. is its own: export that under its checkpoint names, or start the engine "
        f"with {DRAFTER}=keep in its environment, and the drafter stays as it was loaded.",
    )


def drafter_obstacle(drafter: Drafter | None) -> str:
    """Why a drafter that a sync has to write cannot be; "" where it can, or need not be."""
    if drafter is None:
        return ""
    policy = drafter.policy
    if policy.rule == "unknown" and drafter.model is not None:
        return f"the proposer class {policy.model} has a model, of which nobody tells what it is loaded from"
    if policy.rule != "follows":
        return ""
    if policy.unfit:
        return f"the {policy.method} drafter is loaded from the model's own checkpoint, and {policy.unfit}"
    if drafter.model is None:
        return (
            f"the {policy.method} drafter is loaded from the model's own checkpoint, and is out of reach "
            "here: it would go on with old weights"
        )
    return ""


def draft_model_of(runner: Any) -> nn.Module | None:
    """The drafter's own model in a model runner; None where it has none.

    Runners tell it themselves since 0.26; before, it is the proposer's `model`, in a wrapper where graphs are
    captured.
    """
    if has_draft_model_getter(runner):
        model: nn.Module | None = runner.get_draft_model()
        return model
    model = getattr(getattr(runner, "drafter", None), "model", None)
    while hasattr(type(model), "unwrap"):
        model = model.unwrap()  # type: ignore[union-attr, operator]  # vLLM's wrapper, of some class
    return model


def has_draft_model_getter(runner: Any) -> bool:
    """Whether this runner tells its drafter's model itself (0.26 and newer)."""
    return callable(getattr(runner, "get_draft_model", None))


def _wants_kept() -> bool:
    wanted = os.environ.get(DRAFTER, "auto")
    if wanted not in ("auto", "keep"):
        raise UsageError(f"{DRAFTER}={wanted!r} is unknown.", "It is auto or keep.")
    return wanted == "keep"


def _is_one_checkpoint(model: str, config: Any) -> bool:
    """Whether a drafter is loaded from where the model itself is: by the same word, or the same folder."""
    own = {str(name) for name in (config.model, getattr(config, "model_weights", "")) if name}
    return model in own or any(_is_same_folder(model, name) for name in own)


def _is_same_folder(one: str, other: str) -> bool:
    first, second = Path(one), Path(other)
    return first.is_dir() and second.is_dir() and first.resolve() == second.resolve()


def _unfit(speculative: Any) -> str:
    config = speculative.draft_model_config
    experts = int(config.get_num_experts())
    if config.quantization:
        return f"it holds {config.quantization} weights, which plain tensors cannot replace"
    if experts:
        return f"it has {experts} routed experts, whose fused copies are made once after loading"
    if config.use_mla:
        return "it keeps projections derived from kv_b_proj at load time"
    if getattr(speculative, "parallel_drafting", False):
        return "it drafts in parallel from hidden states that were computed from its weights at load time"
    return ""
