"""A small engine model that packs, shards and pads as vLLM's do, and its contracts."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from weightlane.cli import main
from weightlane.facts import EngineFacts
from weightlane.receiver import ExpectedTensor
from weightlane.registry import Registry
from weightlane.trace.contract_making import contract_from_tables
from weightlane.trace.table import PlacementTable, TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightlane.trace.contract import Contract

PACKED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
PACKED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class FakeConfig:
    """Sizes of a model. Layers before `first_moe` are dense; vocabulary is padded to a multiple of 8."""

    layers: int = 2
    hidden: int = 8
    inner: int = 12
    vocab: int = 12
    query: int = 8
    key: int = 4
    experts: int = 4
    first_moe: int = 1
    workers: int = 1
    tied: bool = False
    bias_dtype: torch.dtype = torch.float32


class Packed(nn.Module):
    def __init__(self, rows: int, columns: int, parts: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=torch.bfloat16))
        self.parts = parts


class FakeAttention(nn.Module):
    def __init__(self, config: FakeConfig) -> None:
        super().__init__()
        share = tuple(size // config.workers for size in (config.query, config.key, config.key))
        self.qkv_proj = Packed(sum(share), config.hidden, share)
        self.o_proj = Packed(config.hidden, config.query // config.workers)


class FakeExperts(nn.Module):
    def __init__(self, config: FakeConfig) -> None:
        super().__init__()
        inner = config.inner // config.workers
        for name, shape in (("w13", (2 * inner, config.hidden)), ("w2", (config.hidden, inner))):
            value = torch.empty(config.experts, *shape, dtype=torch.bfloat16)
            setattr(self, f"{name}_weight", nn.Parameter(value))


class FakeMlp(nn.Module):
    def __init__(self, config: FakeConfig, *, sparse: bool) -> None:
        super().__init__()
        inner = config.inner // config.workers
        if sparse:
            self.gate = Packed(config.experts, config.hidden)
            self.gate.register_buffer("e_score_correction_bias", torch.empty(config.experts))
            self.experts = FakeExperts(config)
        else:
            self.gate_up_proj = Packed(2 * inner, config.hidden, (inner, inner))
            self.down_proj = Packed(config.hidden, inner)


class FakeLayer(nn.Module):
    def __init__(self, config: FakeConfig, number: int) -> None:
        super().__init__()
        self.self_attn = FakeAttention(config)
        self.mlp = FakeMlp(config, sparse=number >= config.first_moe)
        self.input_layernorm = Packed(1, config.hidden)


class FakeModel(nn.Module):
    """One worker's part."""

    def __init__(self, config: FakeConfig, worker: int) -> None:
        super().__init__()
        self.config, self.worker = config, worker
        rows = -(-config.vocab // 8) * 8 // config.workers
        self.model = nn.Module()
        self.model.embed_tokens = Packed(rows, config.hidden)
        self.model.layers = nn.ModuleList(FakeLayer(config, number) for number in range(config.layers))
        self.model.norm = Packed(1, config.hidden)
        self.lm_head = Packed(rows, config.hidden)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("rotary", torch.zeros(3), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(name, tensor)

    def _load(self, name: str, given: Tensor) -> None:
        module = name.rpartition(".")[0]
        held: dict[str, Tensor] = dict(self.named_parameters(remove_duplicate=False))
        held |= dict(self.named_buffers())
        piece = module.rpartition(".")[2]
        if ".experts." in name:
            path, _, rest = name.partition(".experts.")
            number, kind = int(rest.split(".")[0]), rest.split(".")[1]
            into = held[f"{path}.experts.{'w2' if kind == 'down_proj' else 'w13'}_weight"][number]
            if kind != "down_proj":
                into = into.chunk(2)[kind == "up_proj"]
            into.copy_(self._share(given, 1 if kind == "down_proj" else 0))
        elif piece in PACKED:
            whole, part = PACKED[piece]
            owner: Any = self.get_submodule(f"{module.rpartition('.')[0]}.{whole}")
            owner.weight.split(owner.parts)[part].copy_(self._share(given, 0))
        elif piece in {"embed_tokens", "lm_head"}:
            into = held[name]
            part = given[self.worker * into.shape[0] : (self.worker + 1) * into.shape[0]]
            into[: part.shape[0]].copy_(part)
            into[part.shape[0] :].fill_(0)
        elif piece in {"o_proj", "down_proj"}:
            held[name].copy_(self._share(given, 1))
        else:
            held[name].copy_(given)

    def _share(self, given: Tensor, axis: int) -> Tensor:
        return given.chunk(self.config.workers, axis)[self.worker]


def checkpoint_of(config: FakeConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes, in the order of a trainer's model."""
    hidden, inner = config.hidden, config.inner
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        for name, rows in (("q", config.query), ("k", config.key), ("v", config.key)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, config.query)
        places = [f"{layer}.mlp"]
        if number >= config.first_moe:
            shapes[f"{layer}.mlp.gate.weight"] = (config.experts, hidden)
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (config.experts,)
            places = [f"{layer}.mlp.experts.{expert}" for expert in range(config.experts)]
        for place in places:
            shapes |= {f"{place}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{place}.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}.input_layernorm.weight"] = (1, hidden)
    shapes["model.norm.weight"] = (1, hidden)
    return shapes if config.tied else {**shapes, HEAD: (config.vocab, hidden)}


def tables_of(
    config: FakeConfig, *, leave: tuple[str, ...] = (), version: str = "1.0"
) -> tuple[PlacementTable, ...]:
    """One table per worker; `leave` names checkpoint tensors that are not sent."""
    sources = tuple(
        TracedSource(name, name, shape, "float32" if "bias" in name else "bfloat16")
        for name, shape in checkpoint_of(config).items()
        if name not in leave
    )
    return tuple(trace_of(config, worker, sources, version) for worker in range(config.workers))


def trace_of(
    config: FakeConfig, worker: int, sources: Sequence[TracedSource], version: str
) -> PlacementTable:
    model = FakeModel(config, worker)
    key = TableKey("acme", version, "FakeForCausalLM", worker, config.workers, config.workers)
    return trace_load(Receiver(model, model.load_weights, key), sources, style="plain")


@pytest.fixture(scope="session")
def fake_config() -> type[FakeConfig]:
    return FakeConfig


@pytest.fixture(scope="session")
def traced() -> Callable[..., tuple[PlacementTable, ...]]:
    return tables_of


@pytest.fixture(scope="session")
def contract_of() -> Callable[..., Contract]:
    """The contract of a fake model; a tied head is dropped with that reason."""

    def make(config: FakeConfig, **options: Any) -> Contract:
        dropped = {HEAD: "the receiver reads model.embed_tokens.weight for it"} if config.tied else {}
        return contract_from_tables(tables_of(config, **options), dropped)

    return make


@dataclass
class Asked:
    """The command line over a registry with the plugin of acme, and a checkpoint folder of its model."""

    plugin: Any
    folder: Path
    run: Callable[..., Any]


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asked:
    """Acme 1.0 is installed here and not running; tables are kept below this test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = FakeConfig()
    shapes = checkpoint_of(config)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["FakeForCausalLM"]}')
    save_file(
        {
            name: torch.zeros(shape, dtype=torch.float32 if "bias" in name else torch.bfloat16)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    expected = tuple(ExpectedTensor(name, shape) for name, shape in shapes.items())
    monkeypatch.setattr("weightlane.checkpoint.expected_tensors_of_config", lambda folder: expected)

    def trace(tensors: Any) -> tuple[PlacementTable, ...]:
        sources = [TracedSource(item.name, item.name, item.shape, item.dtype) for item in tensors]
        return (trace_of(config, 0, sources, "1.0"),)

    fakes = runpy.run_path(str(Path(__file__).with_name("fake_acme.py")))
    plugin = fakes["FakeAcme"](trace, installed="1.0")
    known = EngineFacts("acme", "1.0", "server")
    plugin.live = fakes["FakeEndpoint"]("http://far:1", known, expected, trace)

    def run(*words: str) -> tuple[int, Any, str]:
        registry = Registry(environ={}, project=tmp_path).load()
        registry.register(plugin, name="acme", distribution="acme-weightlane", version="0.1")
        monkeypatch.setattr("weightlane.registry._process_registry", registry)
        capsys.readouterr()
        status = main(words)
        out, err = capsys.readouterr()
        return status, json.loads(out) if "--json" in words else out, err

    return Asked(plugin, folder, run)
