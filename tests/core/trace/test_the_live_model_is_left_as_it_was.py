"""The same tensors, addresses, dictionaries and entries after a trace, whatever the loader did to the model.

The fixture `trace` compares all of that around every trace; these loaders try to leave something behind.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from weightlane.trace.dispatch import Dispatcher
from weightlane.trace.stand_ins import StandIn
from weightlane.trace.table import TableKey, TracedSource
from weightlane.trace.tracing import Receiver, trace_load
from weightlane.trace.values import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Trace = Callable[..., Any]  # of conftest.Traced
    Fingerprint = Callable[[nn.Module], dict[str, Any]]
    Weights = dict[str, Tensor]

A = torch.empty(4, 6)
KEY = TableKey("reference", "1", "Tiny")
SOURCES = (TracedSource("a", "a", (4, 6), "float32"),)


class Slotted(nn.Parameter):
    __slots__ = ("loader",)


class Marked(nn.Parameter):
    """As engines have them: a subclass with attributes, a property and a torch function of its own."""

    @property
    def loader(self) -> str:
        return self.__dict__["_loader"]  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Live(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Marked(torch.randn(4, 6), requires_grad=False)
        self.w._loader = "column"  # type: ignore[attr-defined]
        self.w.shards = []  # type: ignore[attr-defined]
        self.tied = nn.Linear(6, 4, bias=False)
        self.tied.weight = self.w
        self.register_buffer("places", torch.arange(4))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.register_buffer("absent", None)
        self.__dict__["hidden"] = nn.Parameter(torch.randn(4, 6))
        self.__dict__["several"] = [nn.Parameter(torch.randn(2)), "no tensor"]
        self._cached_params_dict = {"w": self.w}
        self.loaded: set[str] = set()
        self.seen: list[str] = []


def ordinary(live: Any, weights: Weights) -> None:
    live.w.data.copy_(weights["a"])


def half_way(live: Any, weights: Weights) -> None:
    live.w.data[:2].copy_(weights["a"][:2])
    raise KeyError("model.layers.0")


def rebinds(live: Any, weights: Weights) -> None:
    live.w = nn.Parameter(weights["a"].clone(), requires_grad=False)


def rebinds_with_data(live: Any, weights: Weights) -> None:
    live.tied.weight = nn.Parameter(torch.zeros(4, 6))


def sets_data(live: Any, weights: Weights) -> None:
    live.w.data = weights["a"]


def sets_plain_data(live: Any, weights: Weights) -> None:
    live.w.data = torch.zeros(4, 6)


def sets_data_on_meta(live: Any, weights: Weights) -> None:
    live.w.data = live.w.data.clone()


def removes(live: Any, weights: Weights) -> None:
    del live.w
    del live.tied


def adds(live: Any, weights: Weights) -> None:
    live.added = nn.Linear(2, 2)
    live.register_buffer("new", torch.zeros(2))
    live.register_parameter("more", nn.Parameter(torch.zeros(2)))


def marks(live: Any, weights: Weights) -> None:
    live.w.data.copy_(weights["a"])
    live.w.shards.append(0)
    live.w.is_loaded = True
    live.loaded.add("w")
    live.seen.append("w")
    live.scale = 2.0
    live._cached_params_dict.clear()
    live._parameters = dict(live._parameters)


def swaps(live: Any, weights: Weights) -> None:
    torch.utils.swap_tensors(live.w, nn.Parameter(torch.zeros(4, 6)))


def resizes(live: Any, weights: Weights) -> None:
    live.w.data.resize_(2)


LEFT_BEHIND = {
    "ordinary": (ordinary, []),
    "half way": (half_way, ["error"]),
    "rebinds": (rebinds, ["rebound"]),
    "rebinds with data": (rebinds_with_data, ["rebound"]),
    "sets data": (sets_data, ["error", "rebound"]),
    "sets plain data": (sets_plain_data, ["error", "rebound"]),
    "sets data on meta": (sets_data_on_meta, ["rebound"]),
    "removes": (removes, ["rebound"]),
    "adds": (adds, ["rebound"]),
    "marks": (marks, []),
    "swaps": (swaps, ["rebound", "error"]),
    "resizes": (resizes, ["computed"]),
}


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_whatever_the_loader_does(trace: Trace, name: str) -> None:
    load, kinds = LEFT_BEHIND[name]
    made = trace(Live(), load, {"a": A})
    assert bool(made.kinds) is bool(kinds)
    assert set(made.kinds) <= set(kinds)


def test_the_fingerprint_sees_what_a_trace_could_leave(fingerprint: Fingerprint) -> None:
    for load in (marks, adds, removes, rebinds):
        live = Live()
        before = fingerprint(live)
        load(live, {"a": torch.zeros(4, 6)})
        assert fingerprint(live) != before
    live = Live()
    before = fingerprint(live)
    with torch.no_grad():
        live.w[0, 0] += 1
    assert fingerprint(live) != before


def test_an_exception_of_the_plugin_leaves_it_too(fingerprint: Fingerprint) -> None:
    live = Live()
    before = fingerprint(live)

    def form(module: nn.Module) -> dict[str, Tensor]:
        if module is live.tied:
            raise RuntimeError("no form")
        return {"w": nn.Parameter(torch.empty(24, device="meta"))}

    receiver = Receiver(live, lambda pairs: None, KEY, loading_form=form)
    with pytest.raises(RuntimeError, match="no form"):
        trace_load(receiver, SOURCES, style="plain")
    assert fingerprint(live) == before


def test_every_name_of_a_target_is_told_and_its_kind(trace: Trace) -> None:
    made = trace(Live(), ordinary, {"a": A})
    targets = {item.name: item for item in made.table.targets}
    assert targets["w"].aliases == ("tied.weight",)
    kinds = {name: (item.kind, bool(item.owned)) for name, item in targets.items()}
    assert kinds == {
        "w": ("parameter", False),
        "places": ("buffer", False),
        "cache": ("buffer", True),
        "hidden": ("attribute", False),
        "several[0]": ("attribute", False),
    }


def test_parameters_in_attributes_lists_and_cached_dictionaries_are_targets(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        live._cached_params_dict["w"].data.copy_(weights["a"])
        live.hidden.data.copy_(weights["a"])
        live.several[0].data.copy_(weights["b"])
        live.places.copy_(weights["n"])

    made = trace(Live(), load, {"a": A, "b": torch.empty(2), "n": torch.empty(4, dtype=torch.int64)})
    assert made.table.targets_of()["a"] == ("w", "hidden")
    assert made.proven()


def test_a_loader_may_look_into_the_engine_s_own_small_buffers(trace: Trace) -> None:
    def load(live: Any, weights: Weights) -> None:
        for row in live.places.tolist():
            live.w.data[row].copy_(weights["a"][3 - row])

    made = trace(Live(), load, {"a": A})
    assert made.kinds == []
    assert made.problems == ["uncovered"] * 3  # places, hidden and several[0]


def test_a_twin_has_the_class_and_the_attributes_of_the_parameter(trace: Trace) -> None:
    class WithSlots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = Slotted(torch.randn(4, 6))
            self.w.loader = "row"  # type: ignore[attr-defined]

    seen: list[tuple[type, str]] = []

    def load(live: Any, weights: Weights) -> None:
        seen.append((type(live.w), live.w.loader))
        live.w.data.copy_(weights["a"])

    assert trace(WithSlots(), load, {"a": A}).proven()
    assert trace(Live(), load, {"a": A}).kinds == []
    assert seen[0] == (Slotted, "row")
    assert seen[-1] == (Marked, "column")


def test_the_form_of_the_checkpoint_takes_the_place_of_packed_weights(trace: Trace) -> None:
    class PackedLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0))

    def form(module: nn.Module) -> dict[str, Tensor]:
        return {"weight": nn.Parameter(torch.empty(4, 6, device="meta"), requires_grad=False)}

    def load(live: Any, weights: Weights) -> None:
        live.weight.data.copy_(weights["a"])

    made = trace(PackedLinear(), load, {"a": A}, loading_form=form)
    assert [(item.form, item.shape) for item in made.table.targets] == [("checkpoint", (4, 6))]
    assert made.proven()


def test_a_hundred_traces_leave_nothing_registered(fingerprint: Fingerprint) -> None:
    live = Live()
    twins: list[weakref.ref[Tensor]] = []
    stand_ins: list[weakref.ref[Tensor]] = []

    def load(pairs: Iterator[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            stand_ins.append(weakref.ref(tensor))
            twins.append(weakref.ref(live.w))
            live.w.data.copy_(tensor.t().contiguous().t())
            live.w.data[0].fill_(tensor[0, 0].item())
            torch.zeros(3).add_(1)

    before = fingerprint(live)
    started = threading.Thread.start
    for _ in range(100):
        table = trace_load(Receiver(live, load, KEY), SOURCES, style="plain")
        assert len(table.placements) == 2
    assert fingerprint(live) == before
    assert threading.Thread.start is started
    gc.collect()
    assert (len(stand_ins), len(twins)) == (300, 300)  # a value is asked for, so each load is run thrice
    assert [ref for ref in (*twins, *stand_ins) if ref() is not None] == []
    assert [item for item in gc.get_objects() if type(item) in (StandIn, Token, Dispatcher)] == []
