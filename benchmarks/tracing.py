"""How long it takes to plan from a trace: the loaders of vLLM, over models of real size on the meta device.

    python benchmarks/tracing.py [--runs 3] [--json]

Run it in an environment that holds vLLM. Nothing of a model's size is allocated. What is judged for each
model is the best run's trace, coverage, packed groups and entries together, and coverage alone; building the
model is shown beside it, since a live engine has one. Exit status 1 when a limit is passed or the coverage is
not complete.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from weightlane.messages import WireTensor
    from weightlane.trace.table import PlacementTable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

COVERAGE_LIMIT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 model; without experts where `experts` is 0. The limit is that of planning it."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool
    limit_seconds: float
    experts: int = 0
    vocabulary: int = 151936
    head: int = 128

    def config(self) -> dict[str, object]:
        """Its `config.json`."""
        family = "Qwen3Moe" if self.experts else "Qwen3"
        common: dict[str, object] = {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "torch_dtype": "bfloat16",
        }
        if self.experts:
            common |= {
                "num_experts": self.experts,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": self.intermediate,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
            }
        return common

    def tensors(self) -> tuple[WireTensor, ...]:
        """Its checkpoint's, with a tied head left out."""
        from weightlane.messages import WireTensor

        queries, keys = self.heads * self.head, self.key_value_heads * self.head
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.self_attn.q_proj.weight": (queries, self.hidden),
                f"{prefix}.self_attn.k_proj.weight": (keys, self.hidden),
                f"{prefix}.self_attn.v_proj.weight": (keys, self.hidden),
                f"{prefix}.self_attn.o_proj.weight": (self.hidden, queries),
                f"{prefix}.self_attn.q_norm.weight": (self.head,),
                f"{prefix}.self_attn.k_norm.weight": (self.head,),
                f"{prefix}.input_layernorm.weight": (self.hidden,),
                f"{prefix}.post_attention_layernorm.weight": (self.hidden,),
            }
            parts = [f"{prefix}.mlp"]
            if self.experts:
                shapes[f"{prefix}.mlp.gate.weight"] = (self.experts, self.hidden)
                parts = [f"{prefix}.mlp.experts.{expert}" for expert in range(self.experts)]
            for part in parts:
                shapes[f"{part}.gate_proj.weight"] = (self.intermediate, self.hidden)
                shapes[f"{part}.up_proj.weight"] = (self.intermediate, self.hidden)
                shapes[f"{part}.down_proj.weight"] = (self.hidden, self.intermediate)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return tuple(WireTensor(name, shape, "bfloat16") for name, shape in shapes.items())


SHAPES = (
    Shape("Qwen3-4B", 2560, 9728, 36, 32, 8, tied=True, limit_seconds=1.0),
    Shape("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, tied=False, limit_seconds=10.0, experts=128),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of the best run. `build_and_trace` is the first run; `processor`, the least that it took of one
    processor, tells on a busy machine what the others cannot.
    """

    model: str
    sources: int
    targets: int
    placements: int
    build_and_trace_seconds: float
    build_and_trace_processor_seconds: float
    trace_seconds: float
    coverage_seconds: float
    groups_seconds: float
    entries_seconds: float
    encode_seconds: float
    planned_seconds: float
    planned_limit_seconds: float
    coverage_limit_seconds: float
    table_bytes: int
    problems: int
    within_limits: bool


def measure(shape: Shape, runs: int) -> Figures:
    tensors = shape.tensors()
    found: list[tuple[float, PlacementTable, dict[str, float], int, int]] = []
    processor: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
        for _ in range(runs):
            begun, busy = time.perf_counter(), time.process_time()
            table = trace(folder, tensors)
            whole = time.perf_counter() - begun
            processor.append(time.process_time() - busy)
            found.append((whole, table, *derive(table, tensors)))
    best = min(found, key=lambda run: run[1].seconds + sum(run[2].values()))
    _, table, seconds, problems, size = best
    planned = table.seconds + seconds["coverage"] + seconds["groups"] + seconds["entries"]
    within = planned <= shape.limit_seconds and seconds["coverage"] <= COVERAGE_LIMIT_SECONDS
    return Figures(
        model=shape.name,
        sources=len(table.sources),
        targets=len(table.targets),
        placements=len(table.placements),
        build_and_trace_seconds=round(found[0][0], 2),
        build_and_trace_processor_seconds=round(min(processor), 2),
        trace_seconds=round(table.seconds, 3),
        coverage_seconds=round(seconds["coverage"], 4),
        groups_seconds=round(seconds["groups"], 4),
        entries_seconds=round(seconds["entries"], 4),
        encode_seconds=round(seconds["encode"], 4),
        planned_seconds=round(planned, 3),
        planned_limit_seconds=shape.limit_seconds,
        coverage_limit_seconds=COVERAGE_LIMIT_SECONDS,
        table_bytes=size,
        problems=problems,
        within_limits=within and not problems,
    )


def trace(folder: str, tensors: tuple[WireTensor, ...]) -> PlacementTable:
    from weightlane.contexts import TraceModelContext
    from weightlane.facts import EngineFacts
    from weightlane.trace.table import Untraced
    from weightlane_vllm.plugin import weightlane_register_backends, weightlane_trace_model

    facts = EngineFacts(engine="vllm", version="", source="installed")
    descriptor = weightlane_register_backends()[0]
    traced = weightlane_trace_model(TraceModelContext(descriptor, facts, folder, tensors))
    if isinstance(traced, Untraced):
        sys.exit(traced.reason)
    (table,) = traced
    return table


def derive(table: PlacementTable, tensors: tuple[WireTensor, ...]) -> tuple[dict[str, float], int, int]:
    """Seconds of each step that a plan takes from a table; its problems; its size in bytes."""
    from weightlane.manifest import Manifest, TensorSpec
    from weightlane.trace.coverage import coverage_problems
    from weightlane.trace.entries import entries_from_table
    from weightlane.trace.groups import packed_groups
    from weightlane.types import Phase

    specs = tuple(TensorSpec(item.name, item.shape, item.dtype, (0,)) for item in tensors)
    manifest = Manifest(Phase.FULL, 1, specs)
    seconds: dict[str, float] = {}
    begun = time.perf_counter()
    problems = coverage_problems([table], {}, receiver="vllm")
    seconds["coverage"] = time.perf_counter() - begun
    begun = time.perf_counter()
    packed_groups([table])
    seconds["groups"] = time.perf_counter() - begun
    begun = time.perf_counter()
    entries_from_table(manifest, table, {})
    seconds["entries"] = time.perf_counter() - begun
    begun = time.perf_counter()
    encoded = msgspec.msgpack.encode(table)
    seconds["encode"] = time.perf_counter() - begun
    for problem in problems[:5]:
        print(problem, file=sys.stderr)
    return seconds, len(problems), len(encoded)


def show(figures: Figures) -> None:
    print(f"{figures.model}: {figures.sources} sources, {figures.placements} placements")
    for step in ("trace", "coverage", "groups", "entries", "encode", "planned"):
        print(f"  {step:10}{1000 * getattr(figures, f'{step}_seconds'):9.1f} ms")
    print(f"  built and traced in {figures.build_and_trace_processor_seconds} s of one processor")
    print(f"  table     {figures.table_bytes:9} bytes")
    print(f"  {'within' if figures.within_limits else 'OVER'} its limits, {figures.problems} problems")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = [measure(shape, arguments.runs) for shape in SHAPES]
    if arguments.json:
        import torch
        import vllm

        about = {"python": platform.python_version(), "torch": torch.__version__, "vllm": vllm.__version__}
        print(
            json.dumps(
                {**about, "cores": os.cpu_count(), "models": [asdict(item) for item in found]}, indent=2
            )
        )
    else:
        for item in found:
            show(item)
    return 0 if all(item.within_limits for item in found) else 1


if __name__ == "__main__":
    sys.exit(main())
