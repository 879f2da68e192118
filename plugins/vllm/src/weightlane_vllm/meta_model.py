"""Traces a model that does not run: the engine's own class, built on the meta device for each rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from weightlane.trace.table import PlacementTable, Untraced
from weightlane_vllm.facts import DISTRIBUTIONS, installed_version

if TYPE_CHECKING:
    from torch import nn

    from weightlane.contexts import TraceModelContext

_LENGTH = 128  # tokens; only tables that no checkpoint holds depend on it
_LORA_RANK = 8


def trace_model(context: TraceModelContext) -> tuple[PlacementTable, ...] | Untraced:
    """One table per worker of a vLLM of this process's version that would run `context.model`."""
    if not installed_version(DISTRIBUTIONS):
        return Untraced("vLLM is not installed in this process, so its model class cannot be built")
    from weightlane_vllm.tracing import table_key, trace_of

    tables: list[PlacementTable] = []
    for rank in range(context.tensor_parallel):
        with contextlib.ExitStack() as place:
            try:
                model, config = _built(context, rank, place)
            except Exception as error:  # noqa: BLE001 - whatever the engine's own constructors raise
                first = (str(error).splitlines() or [""])[0][:300]
                what = "with LoRA wrappers " if context.lora else ""
                return Untraced(
                    f"vLLM's model cannot be built {what}on the meta device for worker {rank} of "
                    f"{context.tensor_parallel}: {type(error).__name__}: {first}"
                )
            # What the trace itself raises is a defect, not a property of the model, and is not caught.
            tables.append(trace_of(model, table_key(config, worker=rank), context.tensors))
    return tuple(tables)


def _built(context: TraceModelContext, rank: int, place: contextlib.ExitStack) -> tuple[nn.Module, Any]:
    """The model and its configuration, as worker `rank` has them until `place` ends."""
    from weightlane_vllm.one_rank import clean_process, place_of_rank

    place.enter_context(clean_process())
    place.enter_context(place_of_rank(rank, context.tensor_parallel))
    config = engine_config(context)
    config.parallel_config.rank = rank
    return build_on_meta(config), config


def engine_config(context: TraceModelContext) -> Any:
    """The configuration of an engine that would run this model; nothing is started."""
    from vllm.engine.arg_utils import EngineArgs

    lora: dict[str, Any] = {"enable_lora": True, "max_lora_rank": _LORA_RANK} if context.lora else {}
    return EngineArgs(
        model=context.model,
        dtype=context.facts.launch_arguments.get("dtype", "auto"),
        tensor_parallel_size=context.tensor_parallel,
        max_model_len=_LENGTH,
        skip_tokenizer_init=True,
        enforce_eager=True,
        **lora,
    ).create_engine_config()


def build_on_meta(config: Any) -> nn.Module:
    """The model of `config` without data, with LoRA wrappers where it has LoRA. Inside `clean_process`."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    compilation = config.compilation_config
    compilation.static_forward_context = {}
    if hasattr(compilation, "static_all_moe_layers"):
        compilation.static_all_moe_layers = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(set_current_vllm_config(config))
        model: nn.Module = initialize_model(vllm_config=config)
        if config.lora_config is not None:
            _wrap(model, config)
    return model.eval()


def _wrap(model: nn.Module, config: Any) -> None:
    import torch
    from vllm.lora.model_manager import create_lora_manager

    scheduler = config.scheduler_config
    create_lora_manager(
        model,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        vocab_size=config.model_config.get_vocab_size(),
        lora_config=config.lora_config,
        vllm_config=config,
        device=torch.device("meta"),
    )
