"""A model with an audio encoder in an `LLM` of this process: what it hears after its weights changed.

python encoders_of_own_llm.py FOLDER ANSWER

The sound is the same each time, so that vLLM's encoder cache holds what the old weights made of it. Weights
go in by the model's own loader, since a lane asks transformers for a causal language model, which this is
not; the caches are emptied by the calls of a lane's schedule. An audio model, because vLLM's vision models
import torchvision, which a CPU build goes without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
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

from weightlane_vllm.requests import RESET_PREFIX_CACHE

Said = tuple[list[int], list[float]]

AUDIO = 511
PROMPT = [17, 250, AUDIO, 33, 8]
TOKENS = 8
RATE = 16_000
WORDS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
SOUND = np.random.default_rng(0).normal(size=RATE // 5).astype(np.float32)


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
    save_file(
        {published(name): tensor for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )
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


def main() -> None:
    folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
    listener = Listener(make_checkpoint(folder), folder)
    from vllm import LLM, SamplingParams

    from weightlane_vllm.llm_calls import LlmCalls
    from weightlane_vllm.routes import RESET_ENCODER_CACHE, Routes
    from weightlane_vllm.sleep_calls import EngineMemory

    llm = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        enforce_eager=True,
        limit_mm_per_prompt={"audio": 1},
        worker_extension_cls="weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    calls = LlmCalls(llm)
    routes = Routes(calls, None, EngineMemory(calls, cache_alone=False))
    parameters = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, logprobs=0, detokenize=False, ignore_eos=True
    )

    def engine_says() -> tuple[list[int], Said]:
        """The prompt as the engine expanded it, and what it said."""
        given = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (SOUND, RATE)}}
        (output,) = llm.generate([given], parameters, use_tqdm=False)
        made = output.outputs[0]
        rows = zip(made.logprobs, made.token_ids, strict=True)
        chosen = [row[token].logprob for row, token in rows]
        return list(output.prompt_token_ids), (list(made.token_ids), chosen)

    prompt, said = engine_says()
    seen: dict[str, Any] = {
        "encodes": bool(calls.config.model_config.is_multimodal_model),
        "sound_tokens": prompt.count(AUDIO),
        "before": off(said, listener.says(prompt)),
        "updates": [],
    }
    for _ in range(3):
        old = listener.says(prompt)
        listener.train()
        tensors = listener.model.state_dict()
        worker.model_runner.get_model().load_weights(
            (published(name), tensor.clone()) for name, tensor in tensors.items()
        )
        truth = listener.says(prompt)
        update = {"moved": off(old, truth)}
        routes.call(RESET_PREFIX_CACHE, 60.0)
        update["prefix_cache_alone"] = off(engine_says()[1], truth)
        routes.call(RESET_PREFIX_CACHE, 60.0)
        update["told"] = routes.call(RESET_ENCODER_CACHE, 60.0)
        update["both"] = off(engine_says()[1], truth)
        seen["updates"].append(update)
    answer.write_text(json.dumps(seen))


def off(some: Said, other: Said) -> float:
    """Infinite where tokens differ."""
    if some[0] != other[0]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(some[1], other[1], strict=True))


if __name__ == "__main__":
    main()
