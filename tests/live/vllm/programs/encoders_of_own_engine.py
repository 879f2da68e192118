"""A model with an audio encoder in an engine of this very process: what it hears after its weights changed.

python encoders_of_own_engine.py FOLDER ANSWER CLASS     (CLASS: llm or async)

The sound is the same each time, so that vLLM's encoder cache holds what the old weights made of it. An audio
model, because vision models of vLLM import torchvision, which a CPU build goes without.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

import weightlane as wl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Said = tuple[list[int], list[float]]

AUDIO = 511
PROMPT = [17, 250, AUDIO, 33, 8]
TOKENS = 8
RATE = 16_000
WORDS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
SOUND = numpy.random.default_rng(0).normal(size=RATE // 5).astype(numpy.float32)


def make_checkpoint(folder: Path) -> Qwen2AudioForConditionalGeneration:
    """A model, and its folder as vLLM's loader reads one."""
    torch.manual_seed(0)
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 64,
            "init_std": 0.15,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        },
        audio_token_index=AUDIO,
    )
    model = Qwen2AudioForConditionalGeneration(config).eval()
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    # By hand: a release of transformers writes `language_model.model.model.`, which vLLM refuses.
    save_file({published(name): tensor for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    words = {f"t{number}": number for number in range(512 - len(WORDS))}
    words |= {word: len(words) + number for number, word in enumerate(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),  # noqa: S106
        additional_special_tokens=list(WORDS),
    )
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer).save_pretrained(folder)
    return model


def published(name: str) -> str:
    """The name in a published checkpoint of a tensor of the module."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head.") else name.removeprefix("model.")


class Listener:
    """The trainer's own model, and what it says of the sound."""

    def __init__(self, model: Qwen2AudioForConditionalGeneration, folder: Path) -> None:
        self.model = model
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
        heard = extractor(
            SOUND, sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        self._heard = {
            "input_features": heard["input_features"],
            "feature_attention_mask": heard["attention_mask"],
        }
        self._steps = 0

    @torch.no_grad()
    def train(self) -> None:
        """Moves every tensor, those of the encoder too."""
        generator = torch.Generator().manual_seed(self._steps)
        self._steps += 1
        for parameter in self.model.parameters():
            sample = torch.randn(parameter.shape, generator=generator)
            parameter.add_(sample * 0.1 * (float(parameter.std()) or 1.0))

    @torch.no_grad()
    def says(self, prompt: list[int]) -> Said:
        """`prompt` with a token for each frame of the sound, as the engine counted them."""
        ids, chosen = list(prompt), []
        for _ in range(TOKENS):
            logits = self.model(
                input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **self._heard
            ).logits
            row = torch.log_softmax(logits[0, -1].float(), -1)
            ids.append(int(row.argmax()))
            chosen.append(float(row[ids[-1]]))
        return ids[len(prompt) :], chosen


def asked(output: Any) -> tuple[list[int], Said]:
    """The prompt as the engine expanded it, and what it said."""
    made = output.outputs[0]
    rows = zip(made.logprobs, made.token_ids, strict=True)
    said = (list(made.token_ids), [row[token].logprob for row, token in rows])
    return list(output.prompt_token_ids), said


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, detokenize=False, ignore_eos=True)


GIVEN = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (SOUND, RATE)}}


@contextmanager
def of_class(words: dict[str, Any]) -> Iterator[tuple[Any, Callable[[], Any], type]]:
    from vllm import LLM

    from weightlane_vllm.llm_calls import LlmCalls

    llm = LLM(**words)
    yield llm, lambda: llm.generate([GIVEN], sampling(), use_tqdm=False)[0], LlmCalls


@contextmanager
def of_async_class(words: dict[str, Any]) -> Iterator[tuple[Any, Callable[[], Any], type]]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from weightlane_vllm.async_llm_calls import AsyncLlmCalls
    from weightlane_vllm.loop_thread import LoopThread

    loop = LoopThread()
    engine: Any = loop.call(lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**words)), 300.0)
    numbers = iter(range(1000))

    async def last() -> Any:
        output = None
        async for output in engine.generate(GIVEN, sampling(), f"asked-{next(numbers)}"):
            pass
        return output

    try:
        yield engine, lambda: loop.run(last(), 120.0), AsyncLlmCalls
    finally:
        loop.call(engine.shutdown, 60.0)
        loop.close()


def off(some: Said, other: Said) -> float:
    """Infinite where tokens differ."""
    if some[0] != other[0]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(some[1], other[1], strict=True))


def main() -> None:
    folder, answer, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    listener = Listener(make_checkpoint(folder), folder)
    words: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"audio": 1},
        "worker_extension_cls": "weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
    }
    seen: dict[str, Any] = {}
    with (of_async_class if kind == "async" else of_class)(words) as (engine, ask, calls):
        prompt, said = asked(ask())
        seen["sound_tokens"] = prompt.count(AUDIO)
        seen["before"] = off(said, listener.says(prompt))
        with wl.connect(
            trainer=wl.trainer("torch", model=listener.model), rollout=[wl.rollout("vllm", engine=engine)]
        ) as lane:
            seen["coverage"] = lane.plan().replicas[0].coverage
            seen["resets"] = "reset_encoder_cache" in str(lane.plan())
            seen["syncs"] = []
            for version in (1, 2, 3):
                stale = listener.says(prompt)
                listener.train()
                lane.sync(version=version)
                truth = listener.says(prompt)
                seen["syncs"].append({"moved": off(stale, truth), "off": off(asked(ask())[1], truth)})
            listener.train()
            with mock.patch.object(calls, "reset_encoder_cache", return_value=None):
                lane.sync(version=4)
            truth = listener.says(prompt)
            seen["without_the_reset"] = off(asked(ask())[1], truth)
            lane.sync(version=5)
            seen["with_it_again"] = off(asked(ask())[1], truth)
    answer.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
