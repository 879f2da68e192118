"""A model that is no longer what its manifest said: a tensor that nobody planned to send is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import export_of, llama, quiet, recipes_of, step, wrapped
from torch import nn

from weightlane.buckets import lay_out_buckets
from weightlane.contexts import StreamContext
from weightlane.errors import ExportError
from weightlane.manifest import merge_rank_manifests
from weightlane.plan import wire_tensors
from weightlane.receiver import NameEntry
from weightlane.torch_trainer import announced
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.export import TorchStream
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD = "lm_head.weight"


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def with_a_second_adapter() -> Any:
    """Its head is trained in one adapter, and tied under the other, which is active."""
    from peft import LoraConfig

    model = wrapped(tied(), modules_to_save=["lm_head"])
    with quiet():
        model.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"]))
    step(model, seed=3)
    model.set_adapter("second")
    return model


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)


def add_a_module(model: Any) -> None:
    model.model.scale = nn.Linear(2, 2)


def switch(model: Any) -> None:
    model.set_adapter("default")


CHANGES: dict[str, tuple[Callable[[], Any], Phase, Callable[[Any], None], str]] = {
    "untied": (tied, Phase.FULL, untie, "lm_head.weight is no longer model.embed_tokens.weight"),
    "added": (tied, Phase.FULL, add_a_module, "model.scale.weight and 1 more tensors are on rank 0"),
    "switched": (with_a_second_adapter, Phase.MERGED, switch, "lm_head.weight is no longer"),
}


def stream_to_a_tied_engine(model: Any, phase: Phase) -> TorchStream:
    export = export_of(model, phase)
    manifest, problems = merge_rank_manifests([describe(export)])
    assert manifest is not None, problems
    assert manifest.aliases == {HEAD: "model.embed_tokens.weight"}
    entries = tuple(
        NameEntry(spec.name, spec.name, spec.dtype, dropped="tied" if spec.name == HEAD else "")
        for spec in manifest.tensors
    )
    tensors = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
    buckets = lay_out_buckets(tensors, bucket_bytes=1 << 20)
    return TorchStream(StreamContext(export, manifest, entries, tensors, buckets, None, (0,), wanted=True))


def sent(stream: TorchStream) -> int:
    with stream:
        return sum(len(bucket) for bucket in stream)


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_nobody_planned_to_send_is_refused(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, phase, make, told = CHANGES[change]
    model = build()
    stream = stream_to_a_tied_engine(model, phase)
    assert sent(stream) == len(recipes_of(model, phase)) - 1
    make(model)
    with pytest.raises(ExportError, match=f"{told}.*connect again"):
        sent(stream)
    # The control: by the announced tensors alone all seems well, and the rest would go nowhere.
    monkeypatch.setattr("weightlane.torch_trainer.export.require_as_announced", only_the_announced)
    assert sent(stream) < len(recipes_of(model, phase))


def only_the_announced(manifest: Any, entries: Any, now: Any, aliases: Any, *, rank: int) -> None:
    for spec, entry in zip(manifest.tensors, entries, strict=True):
        if not entry.dropped:
            announced._require(spec, now.get(spec.name), rank)


def test_two_tensors_that_are_both_sent_may_be_untied() -> None:
    model = tied()
    export = export_of(model, Phase.FULL)
    manifest, _ = merge_rank_manifests([describe(export)])
    assert manifest is not None
    entries = tuple(NameEntry(spec.name, spec.name, spec.dtype) for spec in manifest.tensors)
    tensors = wire_tensors(entries, {spec.name: spec.shape for spec in manifest.tensors})
    buckets = lay_out_buckets(tensors, bucket_bytes=1 << 20)
    stream = TorchStream(StreamContext(export, manifest, entries, tensors, buckets, None, (0,), wanted=True))
    untie(model)
    with stream:
        given = {tensors[number].name: tensor for bucket in stream for number, tensor in bucket}
    assert torch.equal(given[HEAD], given["model.embed_tokens.weight"] + 1)
