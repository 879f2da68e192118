"""Trainer and `sgl.Engine` in one process: syncs an engine handle and writes what was seen, as JSON.

python sync_own_engine.py MODEL ANSWER ARGUMENTS WAY...     (ARGUMENTS: of a server, as a JSON list)
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).parents[2]))  # makes `changing_trainers` importable

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))
TOKENS = 8


def main() -> None:
    model, answer, arguments, *modes = sys.argv[1:]
    import torch

    torch.set_num_threads(1)  # spinning threads of ours would take the schedulers' cores
    # Before SGLang: where it runs on a CPU, our tests wrap torch's factories for it, and transformers then
    # leaves the rotary frequencies of a model unset.
    trainers = {mode: WAYS[mode].trainer(model) for mode in modes}
    import sglang
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(json.loads(arguments)))
    told: dict[str, Any] = {"version": sglang.__version__}
    try:
        for mode in modes:
            told[mode] = three_syncs(engine, trainers[mode], WAYS[mode].options)
        told["alive"] = len(of_the_owner(engine)) == len(PROMPTS)
    finally:
        engine.shutdown()
    Path(answer).write_text(json.dumps(told))


def of_the_owner(engine: Any, adapter: str | None = None) -> list[tuple[list[int], list[float]]]:
    """What the owner of the engine gets from it: tokens and their log-probs, per prompt."""
    outputs = engine.generate(
        input_ids=[list(prompt) for prompt in PROMPTS],
        sampling_params={"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
        return_logprob=True,
        lora_path=[adapter] * len(PROMPTS) if adapter else None,
    )
    rows = [output["meta_info"]["output_token_logprobs"] for output in outputs]
    return [([token for _, token, _ in row], [value for value, _, _ in row]) for row in rows]


def three_syncs(engine: Any, trainer: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Three syncs of a trainer that moves, and what engine and trainer say after each."""
    import weightlane as wl
    from weightlane.messages import Generation

    seen = []
    with wl.connect(
        trainer=wl.trainer("torch", model=trainer.model),
        rollout=[wl.rollout("sglang", engine=engine)],
        bucket_bytes=32 << 10,  # several buckets
        **options,
    ) as lane:
        planned = lane.plan().replicas[0]
        for version in (1, 2, 3):
            moved = trainer.change(seed=version)
            truth = trainer.truth(PROMPTS, TOKENS)
            report = lane.sync(version=version)
            ref = lane.adapter_ref() if options.get("mode") == "adapter" else None
            theirs = of_the_owner(engine, ref.name if ref else None)
            through_us = lane.replicas[0].generate(PROMPTS, max_tokens=TOKENS, adapter=ref)
            seen.append(
                {
                    "moved": moved,
                    "distance": truth.distance(
                        [Generation(tuple(tokens), tuple(values)) for tokens, values in theirs]
                    ),
                    "through_us": truth.distance(through_us),
                    "versions": sorted({item.weight_version for item in through_us}),
                    "verified": report.replicas[0].verified,
                    "phases": [phase.phase.value for phase in report.phases],
                    "coverage": planned.coverage,
                    "era": planned.era,
                    "transport": planned.transport.value,
                    "adapter": ref.name if ref else "",
                }
            )
    return seen


def _policy(model: str) -> Any:
    from changing_trainers import Trainer

    return Trainer(Path(model))


def _adapted(model: str) -> Any:
    from changing_trainers import AdapterTrainer

    return AdapterTrainer(Path(model))


@dataclass(frozen=True)
class Way:
    """What makes the trainer, and what the lane is opened with."""

    trainer: Callable[[str], Any]
    options: dict[str, Any]


WAYS = {
    "full": Way(_policy, {}),
    "collective": Way(_policy, {"transport": "collective"}),
    "release": Way(_policy, {"release": ("kv_cache",)}),
    "merged": Way(_adapted, {"mode": "merged"}),
    "two_slot": Way(_adapted, {"mode": "adapter", "swap": "two_slot"}),
    "paused": Way(_adapted, {"mode": "adapter", "swap": "paused"}),
}


if __name__ == "__main__":
    main()
