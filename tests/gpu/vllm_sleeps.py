"""A lane has a vLLM on a GPU sleep and wake: what that frees, and what it generates afterwards. By hand.

    python tests/gpu/vllm_sleeps.py WORK --engine-python PYTHON [--attention-backend TRITON_ATTN]

WORK is a folder for the model, the log and `answer.json`. Run it where nothing else uses the GPU: memory is
read from the driver. Ends with 1 and says why if something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import weightlane as wl
from weightlane.errors import NotServableError
from weightlane.front.process import start_front_process
from weightlane_vllm.launch import FrontStart, LoraStart, front_command, front_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), tuple(range(3, 203)))
TOKENS = 12
BOTH = ("weights", "kv_cache")
SAME = 1e-3  # of log-probs of one engine that runs twice on the same weights
_EXACT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""LoRA kernels that split no sum, so that one adapter says the same each time; a sampler of vLLM's own."""


def main() -> int:
    options = _options()
    options.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    model = options.work / "model"
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32000,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    answer = {
        "level 2": _level_2(options, model),
        "level 1": _level_1(options, model),
    }
    (options.work / "answer.json").write_text(json.dumps(answer, indent=1))
    print(json.dumps(answer, indent=1))
    return 0


def _level_2(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Full weights, LoRA off: what sleeps is lost, and the next sync brings it back."""
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    as_it_was = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    nbytes = sum(parameter.nbytes for parameter in trainer.parameters())
    with (
        _engine(options, folder, None) as address,
        wl.connect(
            trainer=wl.trainer("torch", model=trainer),
            rollout=[wl.rollout("vllm", url=address)],
            transport="shm",
            release=BOTH,
        ) as lane,
    ):
        print(lane.plan())
        lane.sync(version=1)
        first = _generate(lane)
        awake = _free()
        lane.sleep()
        freed = _free() - awake
        _require(freed >= nbytes, f"sleep freed {freed} bytes, and the weights have {nbytes}")
        _require_refused(lane)
        _change(trainer)
        lane.sync(version=2)
        _require(_distance(first, _generate(lane)) > SAME, "the second version generates the first's")
        lane.sleep()
        lane.wake()
        _require_refused(lane)
        trainer.load_state_dict(as_it_was)
        lane.sync(version=3)
        distance = _distance(first, _generate(lane))
        _require(distance <= SAME, f"the first version again is {distance} from itself")
        left = awake - _free()
    return {"freed": freed, "weights": nbytes, "not given back": left, "distance": distance}


def _level_1(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Adapters: the base and the slots come back by themselves, and no base is sent again."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    _change(model, only=".lora_")
    with (
        _engine(options, folder, LoraStart(slots=2, rank=8)) as address,
        wl.connect(
            trainer=wl.trainer("torch", model=model, adapter="default"),
            rollout=[wl.rollout("vllm", url=address)],
            transport="shm",
            mode="adapter",
            release=BOTH,
        ) as lane,
    ):
        lane.sync(version=1)
        first = _generate(lane)
        awake = _free()
        lane.sleep()
        freed = _free() - awake
        _require_refused(lane)
        lane.wake()
        woken = _distance(first, _generate(lane))
        _require(woken <= SAME, f"after a wake it is {woken} from what it was")
        lane.sleep()
        report = lane.sync(version=2)
        synced = _distance(first, _generate(lane))
        _require(synced <= SAME, f"after a sync of the same adapter it is {synced} from what it was")
        print(report)
        left = awake - _free()
    return {"freed": freed, "not given back": left, "distance woken": woken, "distance synced": synced}


@contextmanager
def _engine(options: argparse.Namespace, folder: Path, lora: LoraStart | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="wl-") as private:
        start = FrontStart(
            model=str(folder),
            address=f"unix:{private}/front",
            device="gpu",
            dtype="auto",
            model_length=512,
            lora=lora,
            release=BOTH,
        )
        command = front_command(start, python=str(options.engine_python))
        if options.attention_backend:
            command = (*command, "--attention-backend", options.attention_backend)
        with start_front_process(
            command,
            start.address,
            log=options.work / f"vllm-{'lora' if lora else 'plain'}.log",
            ready_timeout_seconds=600.0,
            environment={**front_environment(start), **_EXACT},
        ):
            yield start.address


def _generate(lane: wl.Lane) -> list[Any]:
    ref = lane.adapter_ref() if lane.plan().mode.value == "adapter" else None
    return list(lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS, adapter=ref))


def _distance(some: Sequence[Any], others: Sequence[Any]) -> float:
    if [item.token_ids for item in some] != [item.token_ids for item in others]:
        return float("inf")
    pairs = zip(some, others, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=True))


@torch.no_grad()
def _change(model: torch.nn.Module, only: str = "") -> None:
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if only in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.02)


def _require_refused(lane: wl.Lane) -> None:
    try:
        _generate(lane)
    except NotServableError as refusal:
        print(refusal)
    else:
        _require(False, "it generated while it slept, or from weights that were lost")


def _require(right: bool, what: str) -> None:
    if not right:
        raise SystemExit(f"FAIL: {what}")


def _free() -> int:
    return int(torch.cuda.mem_get_info()[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--attention-backend", default="")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
