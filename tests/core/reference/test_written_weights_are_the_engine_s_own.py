"""What a sync left in the engine does not change when the memory that it came in is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightlane.reference.engine import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

COPY = torch.Tensor.copy_


def alias(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What a loader does that keeps what it was handed."""
    target.data = source
    return target


@pytest.mark.requirement("R56", part="full weights")
@pytest.mark.parametrize(("write", "intact"), [(COPY, True), (alias, False)], ids=["copied", "control: kept"])
def test_overwriting_the_buffer_afterwards_changes_nothing(
    untied_folder: str,
    other_untied: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., torch.Tensor],
    intact: bool,
) -> None:
    worker = ReferenceEngine(untied_folder).worker
    buffer = {name: tensor.clone() for name, tensor in other_untied.items()}
    monkeypatch.setattr(torch.Tensor, "copy_", write)
    worker.begin(1)
    worker.load_weights(list(buffer.items()))
    monkeypatch.undo()
    for tensor in buffer.values():
        tensor.fill_(7.0)
    held = worker._live_tensors()
    assert all(torch.equal(held[name], tensor) for name, tensor in other_untied.items()) is intact
