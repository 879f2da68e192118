"""An `AsyncLLM` whose cache is too small for what runs, through syncs that drain; writes JSON.

python preempted_requests.py MODEL ANSWER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from running_load import Load, Versions
from running_requests import LONG, Bench, change

from weightlane_vllm.async_llm_calls import AsyncLlmCalls
from weightlane_vllm.loop_thread import LoopThread

BLOCKS = 7
"""Of 128 tokens each, one of which vLLM keeps: three requests of 420 tokens need twelve."""


def main() -> None:
    folder, answer = sys.argv[1], Path(sys.argv[2])
    from transformers import AutoModelForCausalLM
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=folder,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=BLOCKS,
        worker_extension_cls="weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
    )
    loop = LoopThread()
    engine = loop.call(lambda: AsyncLLM.from_engine_args(arguments), 300.0)
    try:
        bench = Bench(engine, Load(engine, loop), 1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        seen = {"drained": through_a_sync(bench, model, 1)}
        with mock.patch.object(AsyncLlmCalls, "_any_half_done", mock.AsyncMock(return_value=False)):
            seen["by_vllm_alone"] = through_a_sync(bench, model, 11)
        answer.write_text(json.dumps(seen))
    finally:
        loop.call(engine.shutdown, 60.0)
        loop.close()


def through_a_sync(bench: Bench, model: Any, first: int) -> dict[str, Any]:
    """Which versions made each of the requests that ran when a sync came."""
    versions = Versions(model)
    with bench.lane(model, requests="drain") as lane:
        change(model, first)
        versions.keep(first)
        lane.sync(version=first)
        for prompt in LONG:
            bench.load.start(prompt[:120], 300, None)
        change(model, first + 1)
        versions.keep(first + 1)
        started = time.monotonic()
        lane.sync(version=first + 1)
        records = bench.load.end()
    return {
        "errors": [record.error for record in records if record.error],
        "lengths": [len(record.tokens) for record in records],
        "makers": [versions.makers(record) for record in records],
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    main()
