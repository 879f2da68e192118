"""A program: a multiprocess vLLM behind a weightlane front that also tells what its worker holds.

As `python -m weightlane_vllm.server`, with calls more: `hashes` (of every live tensor, and of each LoRA
layer's part of a slot), `generate` and `score` (a text's log-probs; both with an adapter of their own
choosing, also one that vLLM itself reads from a folder), `transfer` and `reload` (`probed_transfers.py`).
They go into the worker as functions, for which vLLM wants VLLM_ALLOW_INSECURE_SERIALIZATION; weightlane's own
messages need no such thing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import FrameType

_SECONDS = 300.0


def hashes_in_worker(worker: Any, number: int) -> dict[str, Any]:
    """Runs inside the worker: hashes of every live tensor, and of what LoRA slot of `number` holds."""
    from live_tensors import device_memory, live_hashes_of, told

    lora: dict[str, str] = {}
    if number:
        manager = worker.model_runner.lora_manager._adapter_manager
        index = manager.lora_index_to_id.index(number)
        for path, layer in manager.modules.items():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                stacks = getattr(layer, kind, ())
                for part, stack in enumerate(stacks if isinstance(stacks, (tuple, list)) else (stacks,)):
                    lora[f"{path} {kind} {part}"] = told(stack[index])
    return {"live": live_hashes_of(worker.model_runner.get_model()), "lora": lora, "memory": device_memory()}


def main() -> int:
    """Starts the engine and serves it until it is told to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--attention-backend", default="")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.2)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--weight-transfer", default="", help="a backend of vLLM's own weight transfer")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    from weightlane.errors import WeightlaneError
    from weightlane.front.server import serve_front
    from weightlane_vllm.eras import reference_here
    from weightlane_vllm.front_engine import WORKER_EXTENSION_CLASS

    llm = LLM(
        model=options.model,
        tensor_parallel_size=options.tensor_parallel_size,
        dtype=options.dtype,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=options.max_lora_rank,
        attention_config={"backend": options.attention_backend} if options.attention_backend else None,
        worker_extension_cls=WORKER_EXTENSION_CLASS,
        weight_transfer_config={"backend": options.weight_transfer} if options.weight_transfer else None,
    )
    try:
        serve_front(_probed(llm, reference_here()), options.address)
    except WeightlaneError as error:
        sys.stderr.write(f"{error}\n{getattr(error, 'remote_traceback', '')}\n")
        llm.llm_engine.engine_core.shutdown()
        return 1
    return 0


def _probed(llm: Any, backend: str) -> Any:
    from probed_transfers import reloaded_in_worker, transferred

    from weightlane_vllm.front_engine import LlmFrontEngine

    class ProbedEngine(LlmFrontEngine):
        """With calls more, each a word and a JSON object."""

        @property
        def _thread(self) -> Any:
            # The one thread that may call the LLM; the protocol of what a front calls does not hold it.
            calls: Any = self._calls
            return calls._driver

        def call(self, route: str, timeout_seconds: float) -> str:
            word, _, rest = route.partition(" ")
            if word == "hashes":
                number = json.loads(rest)["adapter"]
                told = self._thread.run(
                    word, lambda llm: llm.collective_rpc(hashes_in_worker, args=(number,)), _SECONDS
                )
                return json.dumps(told)
            if word == "generate":
                asked = json.loads(rest)
                return json.dumps(self._thread.run(word, lambda llm: _generate(llm, asked), _SECONDS))
            if word == "score":
                asked = json.loads(rest)
                return json.dumps(self._thread.run(word, lambda llm: _score(llm, asked), _SECONDS))
            if word == "transfer":
                asked = json.loads(rest)
                return json.dumps(self._thread.run(word, lambda llm: transferred(llm, asked), _SECONDS))
            if word == "reload":
                folder = json.loads(rest)["folder"]
                told = self._thread.run(
                    word, lambda llm: llm.collective_rpc(reloaded_in_worker, args=(folder,)), _SECONDS
                )
                return json.dumps(told)
            if word == "memory":
                return json.dumps(_free_memory())
            return super().call(route, timeout_seconds)

    return ProbedEngine(llm, backend=backend, start_seconds=_SECONDS)


def _free_memory() -> dict[str, int]:
    import torch

    return {"here": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0}


def _generate(llm: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    named = LoRARequest(*asked["adapter"]) if asked["adapter"] else None
    parameters = SamplingParams(
        temperature=0.0, max_tokens=asked["tokens"], logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=named)
    found = []
    for output in outputs:
        one = output.outputs[0]
        tokens = [int(token) for token in one.token_ids]
        logprobs = [float(row[token].logprob) for token, row in zip(tokens, one.logprobs, strict=True)]
        found.append({"tokens": tokens, "logprobs": logprobs})
    return found


def _score(llm: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The log-probs of one text's tokens but the first; the batch is the same each time."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    named = LoRARequest(*asked["adapter"]) if asked["adapter"] else None
    parameters = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": asked["text"]}]
    (output,) = llm.generate(prompts, parameters, use_tqdm=False, lora_request=named)
    rows = zip(asked["text"][1:], output.prompt_logprobs[1:], strict=True)
    return [{"tokens": asked["text"][1:], "logprobs": [float(row[token].logprob) for token, row in rows]}]


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise SystemExit(0)


if __name__ == "__main__":
    raise SystemExit(main())
