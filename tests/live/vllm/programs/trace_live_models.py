"""Starts vLLM on one tiny model after the other in this process, and writes what each trace showed, as JSON.

With `sweep`, models of twenty architectures are built on the meta device while the first engine lives.

python trace_live_models.py FOLDER ANSWER [sweep]
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROMPTS = ([1, 2, 3, 4, 5], [400, 7, 99])
EXTENSION = "weightlane_vllm.worker_extension.WeightlaneWorkerExtension"
TRACES = 100


@contextmanager
def engine_of(folder: Path, *, lora: bool) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    more: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if lora else {}
    llm = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        worker_extension_cls=EXTENSION,
        **more,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def outputs(llm: Any) -> list[tuple[list[int], list[float]]]:
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    told = []
    for output in llm.generate(prompts, parameters, use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        rows: Any = output.outputs[0].logprobs
        told.append((tokens, [rows[place][token].logprob for place, token in enumerate(tokens)]))
    return told


def trace_one(folder: Path, name: str, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """One start; a start that fails is seen with the engine's own reason."""
    from observed_trace import Seen

    lora = name.endswith("+lora")
    try:
        with engine_of(folder, lora=lora) as llm:
            return asdict(seen_of(llm, name, meanwhile))
    except (AssertionError, RuntimeError, AttributeError, ValueError) as error:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()
        return asdict(Seen(name, started=False, reason=f"{type(error).__name__}: {str(error)[:300]}"))


def seen_of(llm: Any, name: str, meanwhile: Callable[[], None]) -> Any:
    from observed_trace import checkpoint_of, observe

    from weightlane_vllm.worker import VllmWorkerEngine

    worker = worker_of(llm)
    model = worker.model_runner.get_model()
    engine = VllmWorkerEngine(worker)
    said = outputs(llm) if name != "experts+lora" else None  # vLLM's CPU build cannot generate with it
    seen, table = observe(name, engine, model)
    checkpoint = checkpoint_of(engine.describe())
    with torch.inference_mode():
        again = engine.trace(checkpoint)
    seen.facts["same_under_inference_mode"] = again.digest() == table.digest()
    if name == "dense+lora":
        for _ in range(TRACES):
            engine.trace(checkpoint)
        seen.facts["traces"] = TRACES
    meanwhile()
    if said is not None:
        seen.facts["outputs_stay"] = outputs(llm) == said
        seen.facts["logprobs"] = [logprobs for _, logprobs in said]
    if name == "experts+lora":
        seen.facts["plain_names_lose"] = lost_under_plain_names(model, table, checkpoint)
    return seen


def lost_under_plain_names(model: Any, table: Any, checkpoint: Any) -> list[str]:
    """Sources that the loader accepts under their plain names and writes nowhere."""
    from weightlane.trace.coverage import source_coverage
    from weightlane_vllm.tracing import trace_in_style, wrappers_of

    plain = trace_in_style(model, table.key, checkpoint, "plain", wrappers_of(model)).table
    assert not plain.obstacles, plain.obstacles
    return [item.canonical for item in source_coverage([plain]) if not item.consumed]


def without_amx_where_experts_fail() -> None:
    """0.27.1 picks a kernel for experts by this and then finds that it does not take these sizes."""
    from vllm.lora.layers import BaseLayerWithLoRA

    if "load_weights" not in BaseLayerWithLoRA.__dict__:
        torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]


def main() -> None:
    folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
    from architectures import shared_ropes_on_meta, shared_ropes_on_meta_without_care, sweep
    from tiny_checkpoints import make

    import weightlane_vllm.worker_extension  # noqa: F401 - the CPU patch, before any engine
    from weightlane_vllm.patches import plain_cpu_weights

    without_amx_where_experts_fail()
    live: list[dict[str, Any]] = []
    built: list[dict[str, Any]] = []
    ropes: list[int] = []

    def build() -> None:
        built.extend(sweep(folder / "architectures"))
        ropes.append(shared_ropes_on_meta())
        ropes.append(shared_ropes_on_meta_without_care(make("dense", folder)))

    for name in ("dense", "dense+lora", "tied", "tied+lora", "experts", "experts+lora"):
        first = build if name == "dense" and sys.argv[3:] == ["sweep"] else lambda: None
        live.append(trace_one(make(name.partition("+")[0], folder), name, first))
    plain_cpu_weights().undo()
    live.append(trace_one(make("dense", folder), "dense+packed"))
    answer.write_text(json.dumps({"live": live, "built": built, "ropes": ropes}, indent=1))


if __name__ == "__main__":
    main()
