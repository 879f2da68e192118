"""One stream for a model and its drafter: what lands in which, what is kept, and what is told of the rest."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from weightlane.errors import EngineError
from weightlane.messages import WireTensor
from weightlane.trace.coverage import coverage_problems
from weightlane.trace.table import TableKey
from weightlane_vllm.buffers import BufferWrites
from weightlane_vllm.draft_routes import LoadRoutes
from weightlane_vllm.draft_tracing import draft_part
from weightlane_vllm.drafter import DrafterPolicy
from weightlane_vllm.loaded_models import LoadedModels
from weightlane_vllm.model_and_drafter import ModelAndDrafter, root_of
from weightlane_vllm.tracing import live_tensors_of, traced_load
from weightlane_vllm.weight_loading import WeightLoading

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from weightlane_vllm.tracing import TracedLoad

FOLLOWS = DrafterPolicy("mtp", "/model", "follows")
OWN = DrafterPolicy("draft_model", "/other", "if-exported")
KEEPS = DrafterPolicy("mtp", "/model", "keeps", "WEIGHTLANE_VLLM_DRAFTER=keep")
MODEL = {"embed": (4, 2), "layer": (2, 2)}


class FakeLoaded(nn.Module):
    """Parameters under their checkpoint names; its loader passes over what it does not know, as many do."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.handed: list[str] = []

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        known = dict(self.named_parameters(remove_duplicate=False))
        for name, tensor in tensors:
            self.handed.append(name)
            if name in known:
                known[name].copy_(tensor)


class FakeMtp(FakeLoaded):
    """Drafts with a tensor of its own, and with the embeddings of the model."""

    def __init__(self, model: FakeLoaded) -> None:
        super().__init__(mtp=(2, 3))
        self.embed = model.embed


class FakeStrict(FakeLoaded):
    """A loader that refuses what it does not know."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(tensors)
        unknown = given.keys() - dict(self.named_parameters()).keys()
        if unknown:
            raise ValueError(f"There is no parameter named {min(unknown)}")
        super().load_weights(given.items())


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of vLLM that a trace asks: no LoRA, no attention, no layer that was packed."""

    def put(name: str, **members: Any) -> None:
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    layers, reload = "vllm.model_executor.layers", "vllm.model_executor.model_loader.reload"
    for package in ("vllm", "vllm.lora", "vllm.model_executor", layers, "vllm.model_executor.model_loader"):
        put(package)
    put(f"{layers}.attention")
    put(reload)
    put("vllm.lora.layers", BaseLayerWithLoRA=type("BaseLayerWithLoRA", (), {}))
    put(f"{layers}.attention_layer_base", AttentionLayerBase=type("AttentionLayerBase", (), {}))
    put(f"{layers}.attention.attention", set_default_quant_scales=lambda layer, register_buffer: None)
    put(f"{reload}.layerwise", LAYERWISE_INFO={}, LOADING_LAYERS=set())
    put(f"{reload}.sanitize", restore_layer_refs=lambda tensor, layer: tensor)


def traced(
    model: FakeLoaded, drafter: FakeLoaded, policy: DrafterPolicy, sent: Mapping[str, Tensor]
) -> TracedLoad:
    key = TableKey("vllm", "0.32.0", "A")
    tensors = [
        WireTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in sent.items()
    ]
    part = draft_part(model, drafter, policy, key, tensors, MODEL.keys())
    return traced_load(model, key, tensors, part)


def problems(load: TracedLoad) -> list[tuple[str, str]]:
    found = coverage_problems([load.table], {}, receiver="vllm")
    return [(problem.kind, problem.subject) for problem in found]


def loaded(model: FakeLoaded, drafter: FakeLoaded, routes: LoadRoutes, sent: Mapping[str, Tensor]) -> None:
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: drafter)
    )
    model.handed, drafter.handed = [], []
    WeightLoading(worker).load([*sent.items()], routes)


def values(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.full(shape, float(number + 1)) for number, (name, shape) in enumerate(shapes.items())}


def test_each_loader_gets_its_part_and_what_is_shared_is_written_once() -> None:
    model = FakeLoaded(**MODEL)
    drafter, sent = FakeMtp(model), values(**MODEL, mtp=(2, 3))
    load = traced(model, drafter, FOLLOWS, sent)
    assert problems(load) == []
    assert [target.name for target in load.table.targets] == ["embed", "layer", "draft.mtp"]
    assert load.table.targets[0].aliases == ("draft.embed",)
    loaded(model, drafter, load.routes, sent)
    assert (model.handed, drafter.handed) == (["embed", "layer"], ["mtp"])
    assert torch.equal(drafter.mtp, sent["mtp"])
    assert torch.equal(model.embed, sent["embed"])


def test_a_copy_is_written_where_it_is_not_shared() -> None:
    model, drafter = FakeLoaded(**MODEL), FakeLoaded(embed=(4, 2), mtp=(2, 3))
    sent = values(**MODEL, mtp=(2, 3))
    load = traced(model, drafter, FOLLOWS, sent)
    assert problems(load) == []
    loaded(model, drafter, load.routes, sent)
    assert drafter.handed == ["embed", "mtp"]
    assert torch.equal(drafter.embed, sent["embed"])


def test_what_a_drafter_is_not_given_is_named() -> None:
    model = FakeLoaded(**MODEL)
    assert problems(traced(model, FakeMtp(model), FOLLOWS, values(**MODEL))) == [("uncovered", "draft.mtp")]


@pytest.mark.requirement("R72", part="in full precision: a quantised drafter is refused, or kept")
def test_a_drafters_buffer_is_needed_and_one_that_its_loader_does_not_reach_is_written_by_name() -> None:
    model = FakeLoaded(**MODEL)
    drafter = FakeMtp(model)
    drafter.register_buffer("bias", torch.zeros(2))
    sent = values(**MODEL, mtp=(2, 3))
    assert problems(traced(model, drafter, FOLLOWS, sent)) == [("uncovered", "draft.bias")]
    sent["bias"] = torch.full((2,), 7.0)
    load = traced(model, drafter, FOLLOWS, sent)
    assert problems(load) == []
    assert load.routes.buffers == {"bias": "draft.bias"}
    loaded(model, drafter, load.routes, sent)
    assert drafter.handed == ["mtp"]
    assert torch.equal(drafter.get_buffer("bias"), sent["bias"])
    with pytest.raises(EngineError, match=r"Buffer draft\.bias has shape \[2\], and bias has \[1\]"):
        loaded(model, drafter, load.routes, {"bias": torch.zeros(1)})
    with pytest.raises(EngineError, match=r"Buffer draft\.bias has dtype torch\.float32, and bias has"):
        loaded(model, drafter, load.routes, {"bias": torch.zeros(2, dtype=torch.int64)})
    assert torch.equal(drafter.get_buffer("bias"), sent["bias"])


@pytest.mark.parametrize("policy", [OWN, KEEPS])
def test_one_that_keeps_its_weights_is_not_touched_though_it_knows_the_models_names(
    policy: DrafterPolicy,
) -> None:
    model, drafter = FakeLoaded(**MODEL), FakeLoaded(**MODEL)
    sent = values(**MODEL)
    load = traced(model, drafter, policy, sent)
    assert problems(load) == []
    owned = {target.name: target.owned for target in load.table.targets}
    assert owned["draft.layer"] == policy.kept
    assert policy.model in policy.kept
    assert owned["layer"] == ""
    loaded(model, drafter, load.routes, sent)
    assert drafter.handed == []
    assert not any(tensor.any() for tensor in live_tensors_of(drafter).values())
    assert torch.equal(model.layer, sent["layer"])


def test_the_control_a_stream_that_goes_to_both_ruins_it() -> None:
    model, drafter = FakeLoaded(**MODEL), FakeLoaded(**MODEL)
    sent = values(**MODEL)
    drafter.load_weights(sent.items())
    assert torch.equal(drafter.layer, model.layer + sent["layer"]), "every name fits, and nobody says a word"


def test_one_with_a_checkpoint_of_its_own_is_written_where_all_of_it_is_exported() -> None:
    model, drafter = FakeLoaded(**MODEL), FakeStrict(layer=(2, 2), fc=(2,))
    sent = {**values(**MODEL), "draft.layer": torch.full((2, 2), 8.0), "fc": torch.full((2,), 9.0)}
    load = traced(model, drafter, OWN, sent)
    assert problems(load) == []
    assert load.routes.draft.names == {"draft.layer": "layer", "fc": "fc"}
    loaded(model, drafter, load.routes, sent)
    assert torch.equal(drafter.layer, sent["draft.layer"])
    assert torch.equal(model.layer, sent["layer"])
    del sent["fc"]
    assert problems(traced(model, drafter, OWN, sent)) == [("uncovered", "draft.fc")]


def test_a_name_that_neither_takes_is_told() -> None:
    model = FakeLoaded(**MODEL)
    drafter = FakeMtp(model)
    sent = values(**MODEL, mtp=(2, 3), unheard_of=(1,))
    load = traced(model, drafter, FOLLOWS, sent)
    assert problems(load) == [("unconsumed", "unheard_of")]
    strict = FakeStrict(fc=(2,))
    load = traced(model, strict, OWN, values(**MODEL, fc=(2,), unheard_of=(1,)))
    told = coverage_problems([load.table], {}, receiver="vllm")
    assert any("There is no parameter named unheard_of" in problem.what for problem in told)


def test_one_of_another_shape_is_named() -> None:
    model = FakeLoaded(**MODEL)
    sent = values(**MODEL, mtp=(2, 4))
    load = traced(model, FakeMtp(model), FOLLOWS, sent)
    told = coverage_problems([load.table], {}, receiver="vllm")
    assert "The loader of the drafter (FakeMtp) refused mtp. RuntimeError" in told[0].what
    drafter = FakeMtp(model)
    with pytest.raises(EngineError, match=r"The loader of the drafter \(FakeMtp\) refused mtp\."):
        loaded(model, drafter, load.routes, sent)


def test_a_session_leaves_out_a_drafter_that_nothing_goes_to() -> None:
    """What is put in its loading form and given nothing is not what it was."""
    model = FakeLoaded(**MODEL)
    drafter = FakeMtp(model)
    runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: drafter)
    models = LoadedModels(SimpleNamespace(model_runner=runner))
    assert models.written_by(LoadRoutes()) is model
    routes = traced(model, drafter, FOLLOWS, values(**MODEL, mtp=(2, 3))).routes
    root = models.written_by(routes)
    assert isinstance(root, ModelAndDrafter)
    assert {*root.modules()} == {root, model, drafter}


def test_names_under_one_root_are_the_models_own_and_the_drafters_after_draft() -> None:
    model = FakeLoaded(**MODEL)
    root = root_of(model, FakeMtp(model))
    assert [*live_tensors_of(root)] == ["embed", "layer", "draft.mtp", "draft.embed"]
    assert [name for name, _ in root.named_parameters()] == ["embed", "layer", "draft.mtp"]
    BufferWrites(root, {}).load(values(**MODEL).items())
    assert model.handed == ["embed", "layer"]
