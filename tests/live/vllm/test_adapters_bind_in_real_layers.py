"""vLLM's own LoRA layers and manager take adapters from memory and show what they hold; no engine runs.

One process an era makes a worker of TP 1 and both workers of TP 2, and tells everything that it saw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

RANKS = ("0 of 1", "0 of 2", "1 of 2")
Seen: TypeAlias = "dict[str, dict[str, Any]]"


@pytest.fixture(params=["0.32", "0.27.1"])
def seen(request: pytest.FixtureRequest, told_by_layers: Callable[[str], Seen]) -> Seen:
    found = told_by_layers(request.param)
    assert tuple(found)[:3] == RANKS
    return found


@pytest.mark.parametrize("rank", RANKS)
class TestEveryWorker:
    def test_holds_every_module_as_sent_after_one_add_that_leaves_the_tensors_alone(
        self, seen: Seen, rank: str
    ) -> None:
        worker = seen[rank]
        assert (worker["first"], worker["second"]) == ([], [])
        assert worker["adds"] == 1
        assert worker["tensors_untouched"]

    def test_adds_what_the_formula_adds(self, seen: Seen, rank: str) -> None:
        formula = seen[rank]["formula"]
        assert formula["compared"] == (14 if rank == "0 of 1" else 10)
        assert formula["off"] <= 1e-5

    def test_serves_the_old_one_until_the_new_one_is_and_then_frees_it(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        assert worker["served_meanwhile"] == ["default@1"]
        assert "no slot for adapter other@1" in worker["full"]
        assert worker["served_after"] == ["default@2"]
        assert worker["listed_after"]

    def test_has_back_what_a_weight_update_dropped(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        assert worker["dropped"], "else nothing is shown"
        assert worker["back_by_request"]
        assert worker["back_by_asking"]
        assert worker["served_again"] == ["default@2"]
        assert worker["unknown"].startswith("LoRAAdapterNotFoundError"), "others are vLLM's own business"

    def test_gives_one_name_to_a_version_that_is_published_again(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        assert (worker["beside"], worker["first_still"], worker["second_now"]) == ([], [], [])
        assert worker["one_name"] == ["again@1"]
        assert worker["one_number"]
        assert worker["none_left"]

    def test_keeps_an_old_one_until_no_request_runs_with_it(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        assert worker["kept"] == [["kept@2"], [], ["kept@1"]]
        assert worker["kept_is_whole"] == []
        assert "still needs adapter kept@1 in slot kept.0" in worker["slot_is_needed"]
        assert worker["released"], "what is served is not released"
        assert worker["then_loaded"] == []
        assert worker["loaded"] == ["kept@3"]
        assert worker["none_kept"]

    def test_lists_no_half_written_adapter(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        assert worker["failed"] == "RuntimeError: in the middle"
        assert worker["listed_after_failure"]
        assert worker["still_served"] == ["default@2"]
        assert worker["again"] == []

    def test_tells_what_its_layers_do_not_hold_or_hold_otherwise(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        (half,) = worker["half"]
        assert half.startswith("it bound to 7 of 14 modules, not to model.layers.1.self_attn.q_proj")
        (one,) = worker["one_unbound"]
        assert one == "it bound to 13 of 14 modules, not to model.layers.0.self_attn.q_proj"
        (none,) = worker["none_bound"]
        assert none.startswith("it bound to none of its 14 modules")
        assert worker["one_more"][0] == "it also bound to model.layers.0.mlp.up_proj"

    def test_refuses_modules_that_it_has_no_layer_for_before_anything_is_loaded(
        self, seen: Seen, rank: str
    ) -> None:
        assert seen[rank]["refused"] == [
            *("r", "base"),
            *("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_norm"),
            "model.layers.7.mlp.up_proj",
        ]
        assert seen[rank]["lora_off"] == ["enable_lora"]

    def test_tells_a_scale_that_was_folded_twice(self, seen: Seen, rank: str) -> None:
        worker = seen[rank]
        before, once, twice = worker["lent"]
        assert (once, twice) == pytest.approx((2 * before, 4 * before)), "what the copy is for"
        (told,) = worker["folded_twice"]
        assert told.startswith("its scale is 2, but the engine applies model.layers.0.self_attn.q_proj 4")


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_of_their_own_are_held_by_the_newer_era_and_told_to_be_ignored_by_the_older(
    told_by_layers: Callable[[str], Seen], rank: str
) -> None:
    assert told_by_layers("0.32")[rank]["own_ranks"] == []
    (ignored,) = told_by_layers("0.27.1")[rank]["own_ranks"]
    assert "the engine applies model.layers.0.self_attn.q_proj 2 (not 6)" in ignored
