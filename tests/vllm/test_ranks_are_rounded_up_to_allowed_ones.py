"""vLLM is launched for one of a fixed set of ranks; the adapter keeps its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightlane.errors import PlanError
from weightlane.manifest import TensorSpec
from weightlane.peft import adapter_config_of, lora_name
from weightlane_vllm.lora_rank import ALLOWED_RANKS, max_lora_rank, rank_problems

DATA = Path(__file__).parents[1] / "core" / "adapter" / "data" / "peft_config_cases.json"
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in json.loads(DATA.read_text())}


@pytest.mark.requirement("R28", part="the rule")
@pytest.mark.parametrize("release", ["older", "0.32.0"])
def test_a_rank_becomes_the_next_allowed_one_or_an_error(release: str) -> None:
    case = CASES["pf-07"]
    allowed = case["input"]["allowed_by_version"][release]
    for rank, wanted in zip(case["input"]["ranks"], case["expected"][release], strict=True):
        if wanted == "refuse":
            with pytest.raises(PlanError, match=rf"the rank is {rank}, and vLLM takes 512 at most"):
                max_lora_rank(rank, allowed)
        else:
            assert max_lora_rank(rank, allowed) == wanted
    assert tuple(case["input"]["allowed_by_version"]["0.32.0"]) == ALLOWED_RANKS
    with pytest.raises(PlanError, match="no LoRA to launch for"):
        max_lora_rank(0)


def test_an_adapter_above_the_launched_rank_is_refused_also_by_a_pattern() -> None:
    case = CASES["pf-17"]
    for fields, wanted in zip(case["input"]["configs"], case["expected"]["results"], strict=True):
        rank = fields.get("rank_pattern", {}).get("q_proj", fields["r"])
        pair = [
            TensorSpec(lora_name("layers.0.q_proj", side), shape, "float32")
            for side, shape in (("A", (rank, 6)), ("B", (6, rank)))
        ]
        config = adapter_config_of({"peft_type": "LORA", "lora_alpha": 8, **fields}, name="p", tensors=pair)
        problems = rank_problems(config, case["input"]["max_lora_rank"], receiver="vllm 0.32.0")
        assert [problem.subject for problem in problems] == (["r"] if wanted == "refuse" else [])
        assert all("layers.0.q_proj" in problem.what for problem in problems)
