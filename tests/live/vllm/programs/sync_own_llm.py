"""Trainer and `LLM` in one process: syncs an engine handle and writes what was seen, as JSON.

One lane after the other, one for each transport:

python sync_own_llm.py MODEL ANSWER LORA TRANSPORT...     (LORA: on or off; if on, adapters are synced too)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cached_prefix import CachedPrefix

PROMPT = [17, 250, 33, 8, 120, 64, 3]
TOKENS = 8


def main() -> None:
    model_folder, answer, lora, *transports = sys.argv[1:]
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    import weightlane as wl

    with_lora: dict[str, Any] = {}
    if lora == "on":
        with_lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    llm = LLM(
        model=model_folder,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        worker_extension_cls="weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
        **with_lora,
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def truth(prompt: list[int]) -> tuple[list[int], list[float]]:
        ids, chosen = list(prompt), []
        for _ in range(TOKENS):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            chosen.append(float(row[ids[-1]]))
        return ids[len(prompt) :], chosen

    def of_the_owner(prompt: list[int]) -> tuple[list[int], list[float]]:
        parameters = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        rows: Any = output.outputs[0].logprobs
        return tokens, [rows[place][token].logprob for place, token in enumerate(tokens)]

    seen: list[dict[str, Any]] = []

    @torch.no_grad()
    def change(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05 * parameter.std())

    @torch.no_grad()
    def sync_three_times(transport: str) -> None:
        stale = truth(PROMPT)
        with wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=[wl.rollout("vllm", engine=llm)],
            transport=transport,
        ) as lane:
            for version in (1, 2, 3):
                change(len(seen))
                lane.sync(version=version)
                expected, given = truth(PROMPT), of_the_owner(PROMPT)
                (through_us,) = lane.replicas[0].generate([PROMPT], max_tokens=TOKENS)
                seen.append(
                    {
                        "same_tokens": given[0] == expected[0] == list(through_us.token_ids),
                        "distance": max(abs(a - b) for a, b in zip(given[1], expected[1], strict=True)),
                        "moved": expected[0] != stale[0]
                        or max(abs(a - b) for a, b in zip(expected[1], stale[1], strict=True)) > 1e-2,
                        "version": through_us.weight_version,
                        "transport": lane.plan().replicas[0].transport.value,
                        "era": lane.plan().replicas[0].era,
                        "coverage": lane.plan().replicas[0].coverage,
                    }
                )
                stale = expected
            if lora == "on":
                from adapters_of_own_llm import Owner

                owner = Owner(llm)
                before = owner.base()
                lane.sync(version=4)
                after = owner.base()
                seen[-1]["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)

    for transport in transports:
        sync_three_times(transport)
    alive = of_the_owner(PROMPT)[0] == truth(PROMPT)[0]  # closing the lane lets go of the engine, not more
    prefixes = CachedPrefix(llm, model, change, truth, of_the_owner).distances()
    adapters: dict[str, Any] = {}
    if lora == "on":
        from adapters_of_own_llm import sync_adapters

        adapters = sync_adapters(llm, model_folder)
    told = {"syncs": seen, "alive": alive, "prefixes": prefixes, "adapters": adapters}
    Path(answer).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
