"""Packed layers are reloaded, and buffers arrive that no loader of vLLM's takes; real layers, no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

EXACT, WRONG = 1e-5, 1e-2
ERAS = ("0.32", "0.27.1")
KINDS = ("dense", "tied")
BUFFER = "model.layers.1.mlp.experts.gate.e_score_correction_bias"


@pytest.fixture(params=[(era, kind) for era in ERAS for kind in KINDS], ids="-".join)
def reloads(
    request: pytest.FixtureRequest, told_by_layers: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    era, kind = request.param
    return {"era": era, "kind": kind, **told_by_layers(era)["reloads"][kind]}


@pytest.fixture(params=ERAS)
def buffers(
    request: pytest.FixtureRequest, told_by_layers: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    return {"era": request.param, **told_by_layers(request.param)["buffers"]}


class TestPackedLayers:
    def test_are_reloaded_by_evidence(self, reloads: dict[str, Any]) -> None:
        assert reloads["path"] == "layerwise-reload"
        packed, defined = reloads["evidence"]
        assert packed.startswith(f"the engine packed {reloads['emptied']} parameters away")
        assert defined.endswith(":initialize_layerwise_reload is defined")

    @pytest.mark.requirement("R58")
    def test_compute_with_what_was_sent_after_each_sync(self, reloads: dict[str, Any]) -> None:
        assert max(reloads["before"].values()) <= EXACT
        assert min(reloads["stale"].values()) >= WRONG, "else nothing is shown"
        assert max(reloads["synced"].values()) <= EXACT
        assert max(reloads["again"].values()) <= EXACT
        assert reloads["emptied_again"] == reloads["emptied"] > 0
        assert reloads["addresses_stay"], "captured graphs hold on to them"

    def test_are_traced_as_at_first_after_a_reload_of_ours_or_the_engines_own(
        self, reloads: dict[str, Any]
    ) -> None:
        assert reloads["traced_alike"]
        assert reloads["traced_after_the_engines_own"]
        assert not reloads["loaders_left_wrapped"], "the control: loaders that drop what they are given"

    def test_need_tied_heads_packed_again(self, reloads: dict[str, Any]) -> None:
        """The control: 0.32 has a head of its own over the shared weight, 0.27.1 uses the embedding's."""
        off = reloads["tied_head_forgotten"]
        stale = [name for name, distance in off.items() if distance > EXACT]
        assert stale == (["lm_head"] if (reloads["era"], reloads["kind"]) == ("0.32", "tied") else [])
        assert all(off[name] >= WRONG for name in stale)

    @pytest.mark.requirement("R56")
    def test_own_what_their_loaders_keep(self, reloads: dict[str, Any]) -> None:
        """The control: with the bucket's own memory, used again, layers hold what came later."""
        assert max(reloads["borrowed"].values()) >= WRONG

    def test_need_every_shard_in_one_session(self, reloads: dict[str, Any]) -> None:
        """The control: the engine says nothing of a group of which one shard came; a whole sync mends it."""
        assert reloads["one_shard_error"] == ""
        assert reloads["one_shard"]["qkv_proj"] >= WRONG
        assert max(reloads["repaired"].values()) <= EXACT

    def test_are_left_by_a_session_that_failed(self, reloads: dict[str, Any]) -> None:
        assert "dimension" in reloads["failed"]
        assert reloads["closed"]
        assert "has ended" in reloads["after_failure"]
        assert "has ended" in reloads["finish_after_failure"]
        assert max(reloads["after_failed"].values()) <= EXACT

    def test_count_no_shard_of_a_sync_that_was_left_in_the_middle(self, reloads: dict[str, Any]) -> None:
        assert max(reloads["after_left"].values()) <= EXACT
        assert "no attribute 'weight_loader'" in reloads["left_and_not_dropped"], "the control"
        assert max(reloads["in_the_end"].values()) <= EXACT

    def test_are_updated_by_vllms_own_weight_transfer_through_our_backend(
        self, reloads: dict[str, Any]
    ) -> None:
        transfer = reloads["transfer"]
        assert transfer["made"] == "WeightlaneTransferEngine"
        assert transfer["registered_twice"]
        assert [max(off.values()) <= EXACT for off in transfer["after_each"]] == [True, True]
        assert transfer["versions"] == ["1", "2"]

    def test_are_healed_by_the_next_update_of_our_backend(self, reloads: dict[str, Any]) -> None:
        transfer = reloads["transfer"]
        assert "Nothing was announced" in transfer["not_announced"]
        assert max(transfer["after_one_left_open"].values()) <= EXACT
        assert "is not whole" in transfer["cut_short"]
        assert "is not what was sent" in transfer["wrong_digest"]
        assert max(transfer["healed"].values()) <= EXACT
        assert not transfer["active"]

    def test_are_not_updated_in_part_or_by_another_sender(self, reloads: dict[str, Any]) -> None:
        transfer = reloads["transfer"]
        assert transfer["part"].startswith("PlanError")
        assert "would be written by nothing" in transfer["part"]
        assert "Invalid update_info for WeightlaneTransferEngine" in transfer["unknown_word"]
        assert "Use weightlane_vllm.transfer_sender.WeightSender" in transfer["older_way"]
        assert "already has a backend weightlane that is not ours" in transfer["of_somebody_else"]


class TestBuffers:
    def test_that_the_engines_loader_takes_are_left_to_it(self, buffers: dict[str, Any]) -> None:
        assert buffers["model"] == "TransformersMoEForCausalLM"
        assert buffers["problems"] == []
        assert buffers["lands_in"] == [buffers["buffer"]] == [BUFFER]
        assert buffers["routes"] == {}
        assert buffers["arrives"]

    def test_that_are_not_sent_are_uncovered_and_stay_old(self, buffers: dict[str, Any]) -> None:
        (problem,) = buffers["left_out"]
        assert problem.startswith(f"uncovered {buffers['buffer']}: 4 of its 4 elements")
        assert buffers["old_bias_left"], "what the refusal prevents"

    def test_that_no_loader_takes_are_written_by_name(self, buffers: dict[str, Any]) -> None:
        assert "no module or parameter named" in buffers["own_loader"], "the control"
        assert list(buffers["routed"]) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert buffers["routed_problems"] == []
        assert buffers["routed_lands_in"] == [buffers["buffer"]]
        assert buffers["routed_arrives"]

    def test_are_looked_up_at_each_sync(self, buffers: dict[str, Any]) -> None:
        assert buffers["rebound_arrives"]
        assert buffers["replaced_arrives"]
        assert "has no buffer" in buffers["gone"]

    def test_of_another_shape_or_dtype_are_refused_before_a_write(self, buffers: dict[str, Any]) -> None:
        assert "has shape [4], and" in buffers["wrong_shape"]
        assert "has [1]" in buffers["wrong_shape"]
        assert "has dtype torch.float32" in buffers["wrong_dtype"]
        assert "torch.int64" in buffers["wrong_dtype"]
        assert buffers["untouched"]
        (planned,) = buffers["wrong_shape_planned"]
        assert "has shape [4], and" in planned
        (planned,) = buffers["wrong_dtype_planned"]
        assert "torch.int64" in planned
