"""Weights taken inside a merge context and read after it are the unmerged base (the bug of verl #7014).

First the bug itself, then that it cannot happen through a stream: read late, read while the trainer steps,
given up half way. The trainer's own parameters stay as they were, bit for bit, in each case.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import (
    export_of,
    llama,
    merged_by_peft,
    quiet,
    same,
    state_of,
    step,
    stream_of,
    wrapped,
)

from weightlane.errors import ExportError
from weightlane.torch_trainer.unchanged import Unchanged
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from weightlane.manifest import Manifest

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
WRAPPED_Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


@contextmanager
def merged_in_place(model: Any) -> Iterator[None]:
    with quiet():
        model.merge_adapter()
        yield
        model.unmerge_adapter()


@pytest.fixture
def policy() -> Any:
    return wrapped(llama())


def named(manifest: Manifest, buckets: Any) -> dict[str, Tensor]:
    return {manifest.tensors[number].name: tensor for bucket in buckets for number, tensor in bucket}


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_the_bug_tensors_of_a_merge_context_read_after_it_are_the_base(policy: Any) -> None:
    base = policy.state_dict()[WRAPPED_Q_PROJ].clone()
    merged = merged_by_peft(policy)[Q_PROJ]
    with merged_in_place(policy):
        taken = policy.state_dict()[WRAPPED_Q_PROJ]
        inside = taken.clone()
    assert torch.equal(inside, merged)
    assert torch.equal(taken, policy.state_dict()[WRAPPED_Q_PROJ])  # it aliases the live base
    torch.testing.assert_close(taken, base, rtol=0, atol=1e-6)
    assert float((taken - merged).abs().max()) > 0.1


@pytest.mark.requirement("R1")
@pytest.mark.requirement("R2")
@pytest.mark.requirement("R5")
@pytest.mark.requirement("R6")
def test_read_late_it_is_the_merged_weights(policy: Any) -> None:
    before, wanted = state_of(policy), merged_by_peft(policy)
    manifest, stream = stream_of(export_of(policy, Phase.MERGED))
    assert manifest.adapter is None
    assert not [spec.name for spec in manifest.tensors if "lora_" in spec.name or "base_layer" in spec.name]
    buckets = []
    with stream as entered:
        for bucket in entered:
            buckets.append(bucket)
            assert same(state_of(policy), before)
    assert same(named(manifest, buckets), wanted)
    assert same(state_of(policy), before)


@pytest.mark.requirement("R3")
@pytest.mark.requirement("R10")
def test_a_step_after_the_sync_changes_the_next_one_and_not_what_was_given(policy: Any) -> None:
    base = {name: tensor for name, tensor in state_of(policy).items() if "lora_" not in name}
    manifest, stream = stream_of(export_of(policy, Phase.MERGED))
    assert stream.owns_storage
    with stream as entered:
        first = named(manifest, entered)
    kept = copied(first)
    step(policy, seed=5)
    assert same(first, kept)
    with stream as entered:
        second = named(manifest, entered)
    assert same(second, merged_by_peft(policy))
    assert not torch.equal(first[Q_PROJ], second[Q_PROJ])
    assert same({name: tensor for name, tensor in state_of(policy).items() if "lora_" not in name}, base)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert same(first, kept)


def test_in_mode_full_tensors_are_live_and_the_stream_says_so() -> None:
    """The control of the test above: what it sees would show if tensors were not owned."""
    model = llama()
    manifest, stream = stream_of(export_of(model, Phase.FULL))
    assert not stream.owns_storage
    with stream as entered:
        given = named(manifest, entered)
    kept = copied(given)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert not same(given, kept)


def interrupted(policy: Any, phase: Phase) -> dict[str, Tensor]:
    """A training step falls between two buckets."""
    manifest, stream = stream_of(export_of(policy, phase))
    with stream as entered:
        buckets = iter(entered)
        given = [next(buckets), next(buckets)]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.01)
        given += list(buckets)
    return named(manifest, given)


@pytest.mark.requirement("R1")
@pytest.mark.parametrize("phase", [Phase.MERGED, Phase.FULL])
def test_a_step_during_the_export_is_refused(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Any:
        return wrapped(llama()) if phase is Phase.MERGED else llama()

    with pytest.raises(ExportError, match="was changed while its version was exported"):
        interrupted(trained(), phase)
    monkeypatch.setattr(Unchanged, "require", lambda *_: None)
    policy = trained()
    before = merged_by_peft(policy) if phase is Phase.MERGED else state_of(policy)
    torn = interrupted(policy, phase)
    after = merged_by_peft(policy) if phase is Phase.MERGED else state_of(policy)
    if phase is Phase.MERGED:  # without the check: some of the old version and some of the new
        assert torch.equal(torn["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(torn["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(torn["lm_head.weight"], before["lm_head.weight"])


def cut() -> None:
    raise OSError("the cable is out")


@pytest.mark.requirement("R4", part="the base")
@pytest.mark.parametrize("end", ["left", "closed", "raised"])
def test_given_up_half_way_the_trainer_is_as_before(policy: Any, end: str) -> None:
    before = state_of(policy)
    manifest, stream = stream_of(export_of(policy, Phase.MERGED))
    given: list[Any] = []
    try:
        with stream as entered:
            buckets: Any = iter(entered)
            given.append(next(buckets))
            if end == "closed":
                buckets.close()
            if end == "raised":
                cut()
    except OSError:
        assert end == "raised"
    assert same(state_of(policy), before)
    assert not [layer for layer in policy.modules() if getattr(layer, "merged", False)]
    part = named(manifest, given)
    wanted = merged_by_peft(policy)
    assert part
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in part.items())
    with stream as entered:
        assert same(named(manifest, entered), wanted)


@pytest.mark.requirement("R11")
def test_ten_syncs_leave_a_bfloat16_base_bit_for_bit() -> None:
    policy = wrapped(llama(torch.bfloat16))
    before = state_of(policy)
    _, stream = stream_of(export_of(policy, Phase.MERGED))
    for _ in range(10):
        with stream as entered:
            list(entered)
    assert same(state_of(policy), before)
    for _ in range(10):  # the control: merging in place and taking it out again drifts
        with merged_in_place(policy):
            pass
    assert not same(state_of(policy), before)


def test_a_stream_tells_what_rounding_took() -> None:
    told = {}
    for dtype in (torch.float32, torch.bfloat16):
        _, stream = stream_of(export_of(wrapped(llama(dtype)), Phase.MERGED))
        with stream as entered:
            assert stream.update_lost is None
            list(entered)
        told[dtype] = stream.update_lost
    assert told[torch.float32] == 0.0
    assert told[torch.bfloat16] is not None
    assert told[torch.bfloat16] > 1e-4
