"""What a new release changed is named by what it is about, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.trace.contract import Note, Place
from weightlane.trace.contract_diff import contract_differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.trace.contract import Contract


def test_two_versions_that_do_the_same_have_no_difference(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    before, after = contract_of(fake_config()), contract_of(fake_config(layers=3), version="2.0")
    assert (before.engine_version, after.engine_version) == ("1.0", "2.0")
    assert contract_differences(before, after) == ()


def test_lines_added_removed_and_changed_are_told(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    before = contract_of(fake_config())
    lines = list(before.lines)
    embed = lines.index(next(line for line in lines if line.source == "model.embed_tokens.weight"))
    head = next(line for line in lines if line.source == "lm_head.weight")
    moved = Place("model.embedding.weight", padded=True)
    lines[embed] = msgspec.structs.replace(lines[embed], wire="model.embed.weight", places=(moved,))
    lines.remove(head)
    after = msgspec.structs.replace(
        before, lines=tuple(lines), owned=(*before.owned, Note("scale", "made anew")), style="base-layer"
    )
    found = {item.subject: item for item in contract_differences(before, after)}
    assert {subject: item.change for subject, item in found.items()} == {
        "model.embed_tokens.weight": "changed",
        "lm_head.weight": "removed",
        "scale": "added",
        "style": "changed",
    }
    assert found["model.embed_tokens.weight"].words == (
        "name to send was model.embed_tokens.weight, is model.embed.weight; "
        "receiver tensor was model.embed_tokens.weight, is model.embedding.weight"
    )
    assert found["lm_head.weight"].after == ""
    assert found["scale"].after == "scale: made anew"


def test_a_layer_that_became_sparse_is_a_change(
    fake_config: Callable[..., Any], contract_of: Callable[..., Contract]
) -> None:
    found = contract_differences(
        contract_of(fake_config(layers=4)), contract_of(fake_config(layers=4, first_moe=2))
    )
    gate = next(item for item in found if item.subject == "model.layers.{layer}.mlp.gate.weight")
    assert (gate.change, gate.words) == ("changed", "layers was 1 on, is 2 on")
