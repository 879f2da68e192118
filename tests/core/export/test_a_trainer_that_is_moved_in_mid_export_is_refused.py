"""A trainer may be offloaded, moved or freed after the last bucket; before, the export fails and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from export_models import export_of, llama, named_buckets, stream_of, wrapped
from torch import nn

from weightlane.errors import ExportError
from weightlane.torch_trainer.describe import describe
from weightlane.torch_trainer.unchanged import Unchanged
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable


def moved(model: nn.Module) -> None:
    """What `model.to(device)` does: every parameter and buffer gets other memory."""
    model._apply(torch.clone)


def freed(model: nn.Module) -> None:
    """As trainers offload that keep their parameter objects: the memory behind them is let go."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.untyped_storage().resize_(0)


def replaced(model: Any) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone())


def exported_over(model: nn.Module, phase: Phase, event: Callable[[nn.Module], None], *, at: int) -> Any:
    """Every tensor by name; `event` falls after bucket `at`, -1 for the last."""
    manifest, stream = stream_of(export_of(model, phase))
    buckets = len(stream._context.buckets)
    given = []
    with stream as entered:
        for number, bucket in enumerate(entered):
            given.append([(which, tensor.clone()) for which, tensor in bucket])
            if number == at % buckets:
                event(model)
    return named_buckets(manifest, given)


@pytest.mark.requirement("R7")
@pytest.mark.parametrize("event", [moved, freed, replaced])
@pytest.mark.parametrize("phase", [Phase.FULL, Phase.MERGED, Phase.BASE])
@pytest.mark.parametrize("at", [0, -1])
def test_it_is_an_error_after_any_bucket(phase: Phase, event: Callable[..., None], at: int) -> None:
    model = llama() if phase is Phase.FULL else wrapped(llama())
    with pytest.raises(
        ExportError, match=r"was moved, freed or replaced while its version|memory of .* freed"
    ):
        exported_over(model, phase, event, at=at)


@pytest.mark.requirement("R7")
@pytest.mark.parametrize("phase", [Phase.FULL, Phase.MERGED])
def test_after_the_end_it_may_go_where_it_likes(phase: Phase) -> None:
    model = llama() if phase is Phase.FULL else wrapped(llama())
    manifest, stream = stream_of(export_of(model, phase))
    for _ in range(2):
        with stream as entered:
            given = named_buckets(manifest, list(entered))
        moved(model)
    assert given


def test_control_where_nobody_looks_a_move_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unchanged, "require", lambda *_: None)
    assert exported_over(wrapped(llama()), Phase.MERGED, moved, at=0)


@pytest.mark.requirement("R7")
def test_a_trainer_that_is_offloaded_already_is_named_before_anything_is_read() -> None:
    model = llama()
    freed(model)
    with pytest.raises(ExportError, match=r"The memory of model\.embed_tokens\.weight was freed.*Load it"):
        describe(export_of(model, Phase.FULL))
