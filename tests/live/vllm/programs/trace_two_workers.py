"""Starts vLLM at TP 2, traces on both workers and writes what was seen, as JSON.

python trace_two_workers.py FOLDER ANSWER KIND...     (KIND: dense, dense+lora, experts)
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import msgspec


def seen_on(folder: Path, name: str) -> dict[str, Any]:
    from observed_trace import problems_of
    from tiny_checkpoints import make
    from trace_live_models import outputs
    from vllm import LLM

    from weightlane.trace.coverage import source_coverage
    from weightlane.trace.table import PlacementTable

    kind, _, lora = name.partition("+")
    more: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1} if lora else {}
    llm = LLM(
        model=str(make(kind, folder)),
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=128,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        worker_extension_cls="tracing_extension.TracingExtension",
        **more,
    )
    said = outputs(llm)
    answers: list[tuple[str, bytes]] = llm.collective_rpc("traced_here", args=(name,))
    stays = outputs(llm) == said
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    tables = [msgspec.msgpack.decode(table, type=PlacementTable) for _, table in answers]
    alone = [item.canonical for item in source_coverage(tables[:1]) if item.consumed < item.elements]
    return {
        "name": name,
        "workers": [json.loads(seen) for seen, _ in answers],
        "problems": problems_of(tables, name),
        "in_part_on_one": alone,
        "outputs_stay": stays,
    }


def main() -> None:
    folder, answer, *names = sys.argv[1:]
    seen: list[dict[str, Any]] = []
    for name in names:
        seen.append(seen_on(Path(folder), name))
        Path(answer).write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    main()
