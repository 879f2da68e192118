"""`python -m weightlane_vllm.server`: a multiprocess vLLM `LLM` behind a weightlane front.

The engine core and its workers are processes of their own; this one carries messages. It ends on a `Shutdown`
request or on SIGTERM, and takes the engine's processes with it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from weightlane.errors import WeightlaneError
from weightlane_vllm.eras import reference_here
from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS, LlmFrontEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_DESCRIBE_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the engine and serves it; 0 after an orderly end, 1 when it could not be served."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    # In one process nothing would be left to answer while a sync runs, and no engine core to watch.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    from weightlane.front.server import serve_front

    llm = LLM(
        model=options.model,
        tensor_parallel_size=options.tensor_parallel_size,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager == "yes",
        skip_tokenizer_init=True,
        enable_lora=options.enable_lora,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        enable_sleep_mode=options.enable_sleep_mode,
        speculative_config=options.speculative_config,
        attention_config={"backend": options.attention_backend} if options.attention_backend else None,
        worker_extension_cls=WORKER_EXTENSION_CLASS,
    )
    try:
        engine = LlmFrontEngine(llm, backend=reference_here(), start_seconds=_DESCRIBE_SECONDS)
        serve_front(engine, options.address)
    except WeightlaneError as error:
        sys.stderr.write(f"{error}\n{getattr(error, 'remote_traceback', '')}\n")
        llm.llm_engine.engine_core.shutdown()
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weightlane_vllm.server", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--address", required=True, help="unix:/path or tcp:127.0.0.1:port")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="float32 on a CPU build")
    parser.add_argument("--max-model-len", type=int, default=None, help="tokens of prompt and continuation")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--enable-lora", action="store_true", help="so that adapters can be received")
    parser.add_argument("--max-loras", type=int, default=1, help="two for a lane with swap two_slot")
    parser.add_argument("--max-lora-rank", type=int, default=16, help="the largest rank of any adapter")
    parser.add_argument(
        "--enable-sleep-mode", action="store_true", help="so that a lane can let its memory go (GPU)"
    )
    parser.add_argument(
        "--speculative-config", type=json.loads, default=None, help="what drafts, as vLLM's own JSON"
    )
    parser.add_argument("--attention-backend", default="", help="vLLM's name of one, such as TRITON_ATTN")
    parser.add_argument(
        "--enforce-eager",
        choices=("yes", "no"),
        default="yes",
        help="no: graphs and compilation; weights are written in place, so both see new ones",
    )
    return parser


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main())
