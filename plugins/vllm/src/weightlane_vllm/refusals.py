"""What this era does not carry: each refusal names the feature, the reason and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.errors import Problem
from weightlane_vllm.drafter import DRAFTER
from weightlane_vllm.load_path import emptied_names

if TYPE_CHECKING:
    from weightlane.probes import NotViable
    from weightlane.receiver import LiveTensor


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """The features of a live engine that decide whether plain checkpoint tensors may be loaded into it.

    `experts` is the number of routed experts of the model (0 when dense), `drafter` what stands against
    writing the model that drafts ("" where nothing does, or it is not written), `kv_connector` the name of
    what carries keys and values out of the engine ("" without one). `prefetched_layers` is the number of
    layers in a group of which some are kept on the host and fetched ahead (0 without).
    """

    quantization: str = ""
    experts: int = 0
    lora: bool = False
    pipeline_parallel: int = 1
    data_parallel: int = 1
    latent_attention: bool = False
    drafter: str = ""
    kv_connector: str = ""
    prefetched_layers: int = 0


def refusals_of(features: EngineFeatures) -> tuple[Problem, ...]:
    """Every feature that stands against a sync, one problem each; empty when nothing does."""
    problems: list[Problem] = []
    if features.quantization:
        problems.append(
            _capability(
                "quantization",
                f"the engine holds {features.quantization} weights, which its loader made from a checkpoint "
                "and which plain tensors cannot replace without its reload path",
                "Start the engine without quantization.",
            )
        )
    if features.experts:
        wrapper = (
            ", and with LoRA on the loader reports success for experts under their checkpoint names and "
            "writes none of them"
            if features.lora
            else ""
        )
        problems.append(
            _capability(
                "mixture-of-experts",
                f"the model has {features.experts} routed experts, whose fused copies are made once after "
                f"loading and are not made again{wrapper}",
                "Use a dense model with this era.",
            )
        )
    if features.latent_attention:
        problems.append(
            _capability(
                "latent-attention",
                "the model keeps projections derived from kv_b_proj at load time, which would stay those of "
                "the old weights",
                "Use a model without multi-head latent attention with this era.",
            )
        )
    if features.pipeline_parallel > 1:
        problems.append(
            _capability(
                "pipeline-parallel",
                f"the engine runs {features.pipeline_parallel} pipeline stages, and a worker's loader "
                "refuses names of other stages",
                "Start it with pipeline_parallel_size=1.",
            )
        )
    if features.data_parallel > 1:
        problems.append(
            _capability(
                "data-parallel",
                f"the engine runs {features.data_parallel} data-parallel copies, of which a call reaches one",
                "Start one engine per copy and give the lane each as a replica.",
            )
        )
    if features.drafter:
        problems.append(
            _capability(
                "speculative-decoding",
                features.drafter,
                f"Start the engine without a speculative config, or with {DRAFTER}=keep in its environment: "
                "its drafter then stays as it was loaded, and drafts less well with each sync.",
            )
        )
    if features.kv_connector:
        problems.append(
            _capability(
                "kv_transfer_config",
                f"the engine keeps or passes on keys and values through {features.kv_connector}, which the "
                "reset of its prefix cache does not empty: prefixes computed by the old weights would "
                "survive there and be served after a sync",
                "Start the engine without kv_transfer_config and kv_offloading_size.",
            )
        )
    if features.prefetched_layers:
        # model_executor/offloader/prefetch.py: what a loader writes is the buffer that each forward fills
        # from a copy on the host, and nothing takes a write into that copy.
        problems.append(
            _capability(
                "offload_group_size",
                "the engine fetches layers ahead from copies on the host, in groups of "
                f"{features.prefetched_layers}, and no load reaches these: old weights overwrite what a sync "
                "writes",
                "Start the engine without offload_group_size; cpu_offload_gb keeps no second copy.",
            )
        )
    return tuple(problems)


def prefetched_layers(config: Any) -> int:
    """Layers in a group of vLLM's prefetching offloader, 0 where it is off or this version has none.

    Args:
        config: vLLM's `VllmConfig`; older versions have no `offload_config`.
    """
    offload = getattr(config, "offload_config", None)
    if offload is None or offload.offload_backend == "uva":
        return 0
    return int(offload.prefetch.offload_group_size)


def no_load_path(path: NotViable, live: tuple[LiveTensor, ...]) -> Problem:
    """Why the model as it stands can be loaded neither in place nor layer by layer."""
    emptied = emptied_names(live)
    return Problem(
        "capability",
        emptied[0] if emptied else "load_weights",
        f"{path.reason}, so there is nothing to write to (CPU builds pack linear weights away)",
        "Start the engine with the worker extension of weightlane-vllm, in float32 on a CPU.",
        near=tuple(emptied[1:4]),
    )


def _capability(subject: str, what: str, fix: str) -> Problem:
    return Problem("capability", subject, what, fix)
