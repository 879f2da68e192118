"""What was written is read as it was; a file that was damaged is an error that names the line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.errors import ContractError
from weightlane.trace.contract import Contract, Line, Note, Place, Refused
from weightlane.trace.contract_text import contract_text, parse_contract

if TYPE_CHECKING:
    from collections.abc import Callable

names = st.sampled_from(["norm.weight", "layers.{layer}.q", "layers.{layer}.experts.{expert}.up", "a.0.b_1"])
layers = st.sampled_from(["all", "0", "1 on", "up to 3", "1 and every 2 on", "0 2 5"])
words = st.sampled_from(["tied", "a buffer: the engine's own (made anew), once", "x -> y + z"])
dtypes = st.sampled_from(["float16", "float32", "bfloat16"])
places = st.builds(
    Place,
    target=names,
    where=st.sampled_from(["whole", "rows 1 of 3", "slice {expert}", "slice {expert} rows 2 of 2"]),
    taken=st.sampled_from(["", "rows 2 of 3", "a part"]),
    split=st.sampled_from(["", "rows", "columns", "axis 2", "elements"]),
    order=st.sampled_from(["", "transposed", "rearranged"]),
    dtype=st.one_of(st.just(""), dtypes),
    via=st.lists(dtypes, max_size=2).map(tuple),
    padded=st.booleans(),
)
lines = st.one_of(
    st.builds(Line, names, names, layers, st.lists(places, min_size=1, max_size=2).map(tuple)),
    st.builds(Line, names, names, layers, dropped=words),
)
notes = st.lists(st.builds(Note, names, words, layers), max_size=2).map(tuple)
refusals = st.builds(
    Refused,
    st.sampled_from(["computed", "value-dependent"]),
    st.sampled_from(["", "aten.exp"]),
    st.lists(names, max_size=2).map(tuple),
)
contracts = st.builds(
    Contract,
    engine=st.sampled_from(["acme", "vllm"]),
    engine_version=st.sampled_from(["1.0", "0.5.18", "0.33.0.dev1+g12"]),
    architecture=st.just("FakeForCausalLM"),
    tensor_parallel=st.integers(1, 8),
    lora=st.booleans(),
    style=st.sampled_from(["plain", "mixed"]),
    lines=st.lists(lines, max_size=4).map(tuple),
    owned=notes,
    aliases=notes,
    uncovered=notes,
    refused=st.lists(refusals, max_size=2).map(tuple),
)


@settings(max_examples=25)
@given(contracts)
def test_any_contract_is_read_as_it_was_written(contract: Contract) -> None:
    assert parse_contract(contract_text(contract), origin="a file") == contract


@pytest.fixture(scope="module")
def text(fake_config: Callable[..., Any], contract_of: Callable[..., Contract]) -> str:
    return contract_text(contract_of(fake_config(workers=2)))


def test_a_real_contract_is_read_as_it_was_written(text: str) -> None:
    assert contract_text(parse_contract(text, origin="a file")) == text


def test_every_line_that_is_lost_or_doubled_is_seen(text: str) -> None:
    every = text.split("\n")
    for number in range(len(every)):
        for damaged in (every[:number] + every[number + 1 :], every[: number + 1] + every[number:]):
            with pytest.raises(ContractError, match="damaged in line"):
                parse_contract("\n".join(damaged), origin="a file")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("format 1", "format 2"),
        ("acme 1.0", "acme"),
        ("tensor parallel  2", "tensor parallel  two"),
        ("split by rows", "split up"),
        ("(layers 1 on)", "(layers from one)"),
        (" -> lm_head.weight: ", " lm_head.weight: "),
        ("[end]", "[fin]"),
        ("rows 2 of 3, split", "rows 2 of 3 split"),
        ("whole, split by rows, padded", "whole, padded, split by rows"),
    ],
)
def test_a_word_that_was_changed_is_seen(text: str, before: str, after: str) -> None:
    assert before in text
    with pytest.raises(ContractError, match=r"The contract a file is damaged in line \d+"):
        parse_contract(text.replace(before, after, 1), origin="a file")


def test_half_a_file_is_damaged(text: str) -> None:
    for part in (0, 10, len(text) // 2, len(text) - 3):
        with pytest.raises(ContractError):
            parse_contract(text[:part], origin="a file")
