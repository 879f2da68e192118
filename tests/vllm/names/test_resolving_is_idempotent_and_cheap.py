"""What holds for any name: twice is once, one segment at most, nothing is done where nothing is wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from name_cases import NAMESPACES, ROWS, recorded

import weightlane_vllm.names
from weightlane.manifest import Manifest, TensorSpec
from weightlane.types import Phase
from weightlane_vllm.mapper import NameMapper
from weightlane_vllm.names import OLDER_SPELLINGS, is_taken, map_names, resolve
from weightlane_vllm.namespace import SEGMENT, Namespace, with_segment, without_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPONENTS = sorted(
    {part for told in NAMESPACES.values() for name in told["live"] for part in name.split(".")}
    | {part for row in ROWS.values() for part in row["incoming"].split(".")} - {"base_layer"}
    | {piece for told in NAMESPACES.values() for whole in told.get("packed", {}).values() for piece in whole}
)
KNOWN = sorted({name for told in NAMESPACES.values() for name in told["live"]})
KNOWN += [row["incoming"] for row in ROWS.values()]


@st.composite
def names(draw: st.DrawFn) -> str:
    """A known name, or one put together from their components, with the segment in one place at most."""
    parts = draw(
        st.sampled_from(KNOWN).map(lambda name: name.split("."))
        | st.lists(st.sampled_from(COMPONENTS), min_size=1, max_size=7)
    )
    parts = [part for part in parts if part != "base_layer"]
    at = draw(st.none() | st.integers(0, len(parts)))
    return ".".join(parts if at is None else [*parts[:at], "base_layer", *parts[at:]])


@pytest.mark.requirement("R51")
@settings(max_examples=60)
@given(
    name=names(),
    namespace=st.sampled_from(sorted(NAMESPACES)),
    wrapper_loads=st.booleans(),
    expert_prefix=st.sampled_from(["", "base_layer."]),
)
def test_resolving_twice_gives_what_resolving_once_gives(
    name: str, namespace: str, *, wrapper_loads: bool, expert_prefix: str
) -> None:
    space = Namespace.of(recorded(namespace, wrapper_loads=wrapper_loads, expert_prefix=expert_prefix))
    once = resolve(name, space)
    again = resolve(once.wire, space)
    assert (again.wire, again.target) == (once.wire, once.target)
    assert is_taken(once.wire, space) is bool(once.target)
    spelt = [name, *(old + name[len(new) :] for new, old in OLDER_SPELLINGS if name.startswith(new))]
    assert without_segment(once.wire) in map(without_segment, spelt), "never what the mapper makes of it"


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("wrapper_loads", [False, True])
@pytest.mark.parametrize("case", sorted(ROWS.keys() - {"double_suffix"}))
def test_each_recorded_name_resolves_once_for_all(case: str, *, wrapper_loads: bool) -> None:
    space = Namespace.of(recorded(ROWS[case]["namespace"], wrapper_loads=wrapper_loads))
    once = resolve(ROWS[case]["incoming"], space).wire
    assert resolve(once, space).wire == once


@pytest.mark.requirement("R47")
@settings(max_examples=25)
@given(name=names(), wrapper_loads=st.booleans())
def test_every_name_for_a_drafter_is_stripped(name: str, *, wrapper_loads: bool) -> None:
    space = Namespace.of(recorded("drafter", wrapper_loads=wrapper_loads))
    assert SEGMENT not in resolve(name, space).wire


@pytest.mark.requirement("R49")
@pytest.mark.parametrize("namespace", ["dense_plain", "packed_plain", "moe_plain", "drafter"])
def test_without_a_wrapper_names_stay_and_spelling_is_not_run(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(
        weightlane_vllm.names,
        "spell",
        lambda name, space: called.append(name) or name,  # type: ignore[func-returns-value]
    )
    live = NAMESPACES[namespace]["live"]
    manifest = Manifest(Phase.FULL, 1, tuple(TensorSpec(name, (2,), "float32") for name in live))
    entries = map_names(manifest, recorded(namespace, wrapper_loads=False))
    assert [entry.wire for entry in entries] == live
    assert called == []
    wrapped = map_names(manifest, recorded("dense_lora", wrapper_loads=False))
    assert called == [entry.wire for entry in wrapped], "it is run where there is a wrapper"


class CountedPacking(dict[str, tuple[str, ...]]):
    """A packed table that counts how often it is walked."""

    walks = 0

    def items(self) -> Iterator[tuple[str, tuple[str, ...]]]:  # type: ignore[override]
        self.walks += 1
        return iter(super().items())


@pytest.mark.requirement("R50")
def test_the_packed_table_is_inverted_once_per_model() -> None:
    packed = CountedPacking({"qkv_proj": ("q_proj", "k_proj", "v_proj")})
    live = [f"model.layers.{layer}.self_attn.qkv_proj.base_layer.weight" for layer in range(4)]
    space = Namespace(live, NameMapper(), packed, wrapper_loads=False)
    for layer in range(4):
        for piece in "qkv":
            name = f"model.layers.{layer}.self_attn.{piece}_proj.weight"
            assert resolve(name, space).target == live[layer]
    assert packed.walks == 1


@pytest.mark.requirement("R54")
@pytest.mark.parametrize("wrapper_loads", [False, True])
def test_the_spelling_that_a_loader_drops_in_silence_counts_as_not_taken(*, wrapper_loads: bool) -> None:
    plain = ROWS["moe_indexed_leaf"]["incoming"]
    with_prefix = Namespace.of(recorded("moe_lora", wrapper_loads=wrapper_loads, expert_prefix="base_layer."))
    assert not is_taken(plain, with_prefix)
    assert is_taken(with_segment(plain), with_prefix)
    without = Namespace.of(recorded("moe_lora", wrapper_loads=wrapper_loads))
    assert is_taken(plain, without)
    assert not is_taken(with_segment(plain), without)
