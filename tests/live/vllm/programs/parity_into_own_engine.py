"""Lanes of trainer ranks into a vLLM that rank 0 made for itself; prints what each lane's syncs showed.

python parity_into_own_engine.py PLACE MODEL TENSOR_PARALLEL SYNCS LANE...

PLACE is `in-process`, `multiprocess` (both an `LLM`) or `async` (an `AsyncLLM`). Each LANE is one word:
options of `weightlane.testing.parity`. With `in-process` the engine core runs in rank 0, and at TP 1 its
worker too; rank 0 is then the only one: the worker takes the process group that it finds there for its own.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_START_SECONDS = 400.0
_END_SECONDS = 60.0


def main() -> int:
    place, model, tensor_parallel, syncs, *lanes = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if place == "in-process" else "1"
    register_sharded_trainer()
    from weightlane.testing import parity

    engine_arguments: dict[str, Any] = {
        "model": model,
        "tensor_parallel_size": int(tensor_parallel),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 4,
        "worker_extension_cls": "weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
    }
    common = ["--model", model, "--engine", "vllm", "--url", parity.IN_PROCESS, "--syncs", syncs]
    open_engine = of_async_class if place == "async" else of_class
    # The engine first: its processes are forks, and must not be those of a rank that has joined the others.
    owned = open_engine(engine_arguments) if os.environ["RANK"] == "0" else nullcontext()
    with owned as engine, parity.joined_ranks():
        held = [parity.run(parity.parse([*common, *shlex.split(lane)]), engine) for lane in lanes]
    return 0 if all(held) else 1


def register_sharded_trainer() -> None:
    """vLLM's environment holds no distribution of the `fsdp` trainer: its module is on PYTHONPATH alone."""
    import weightlane_fsdp.plugin
    from weightlane.registry import get_registry

    get_registry().register(weightlane_fsdp.plugin, name="fsdp")


@contextmanager
def of_class(engine_arguments: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(**engine_arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def of_async_class(engine_arguments: dict[str, Any]) -> Iterator[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from weightlane_vllm.loop_thread import LoopThread

    loop = LoopThread()
    engine: Any = None
    try:
        engine = loop.call(
            lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments)), _START_SECONDS
        )
        yield engine
    finally:
        if engine is not None:
            loop.call(engine.shutdown, _END_SECONDS)
        loop.close()


if __name__ == "__main__":
    raise SystemExit(main())
