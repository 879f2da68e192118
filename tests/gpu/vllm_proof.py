"""The proof over vLLM: how its engines are started, fed by a lane, and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from proof import Proof
from proof_ground import HERE, START_SECONDS
from proof_words import BATCH_INVARIANT

import weightlane as wl
from weightlane.front.client import FrontEndpoint
from weightlane.front.process import start_front_process
from weightlane_vllm.launch import FrontStart, front_environment


class VllmProof(Proof):
    """An adapter is what a LoRARequest is made of: name, number and path."""

    title = "vLLM"

    def engine(self, name: str, model: Path, *more: str) -> FrontEndpoint:
        """`more` are arguments of `probed_engine.py`."""
        address = f"unix:{self.scratch}/{name}.sock"
        python = self.options.engine_python
        words = [python, str(HERE / "probed_engine.py"), "--model", str(model), "--address", address]
        device: Literal["cpu", "gpu"] = "cpu" if self.options.device == "cpu" else "gpu"
        start = FrontStart(str(model), address, device, self.options.tensor_parallel)
        environment = dict(front_environment(start))
        words += ["--tensor-parallel-size", str(self.options.tensor_parallel), *more]
        if self.options.device == "cpu":
            words += ["--dtype", "float32"]
        else:
            environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
            words += ["--dtype", "bfloat16", "--attention-backend", "TRITON_ATTN"]
            words += ["--gpu-memory-utilization", "0.2"]
        if self.options.kernels == BATCH_INVARIANT:
            environment |= {"VLLM_BATCH_INVARIANT": "1"}
        with self.timed(f"start of engine {name}"):
            self.ends.enter_context(
                start_front_process(
                    words,
                    address,
                    log=Path(self.options.out) / f"engine-{name}.log",
                    ready_timeout_seconds=START_SECONDS,
                    environment=environment,
                )
            )
        return FrontEndpoint(address, 300.0)

    def rollout(self, engine: FrontEndpoint) -> Any:
        return [wl.rollout("vllm", url=engine.address)]

    def named(self, ref: Any) -> list[Any]:
        from weightlane_vllm.lora_request import lora_number, lora_path

        return [ref.name, lora_number(ref.name), lora_path(ref)]

    def slot(self, named: list[Any]) -> int:
        return int(named[1])

    def from_folder(self, engine: FrontEndpoint, folder: Path) -> list[Any]:
        """vLLM reads it at the first request that names it."""
        return ["from-folder", 1, str(folder)]
