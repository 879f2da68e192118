"""Two eras share a backend name, so an engine's own front names the one that its vLLM is of."""

from __future__ import annotations

import sys
import types

import pytest

from weightlane.errors import SelectionError
from weightlane.registry import get_registry
from weightlane_vllm.eras import reference_here


class FakeNewerWrapper:
    """Stands for 0.28 and later."""

    def load_weights(self, weights: object) -> None: ...


class FakeOlderWrapper:
    """Stands for 0.27.1."""


@pytest.mark.parametrize(
    ("wrapper", "era"), [(FakeNewerWrapper, "lora-load-weights"), (FakeOlderWrapper, "base-layer-names")]
)
def test_the_reference_is_that_of_the_loaded_engine_and_a_worker_finds_it(
    monkeypatch: pytest.MonkeyPatch, wrapper: type, era: str
) -> None:
    for name in ("vllm", "vllm.lora", "vllm.lora.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.lora.layers"], "BaseLayerWithLoRA", wrapper, raising=False)
    reference = reference_here()
    found = get_registry().backend_named(reference)
    assert found is not None
    assert (found.descriptor.era, found.reference) == (era, reference)


def test_the_plain_name_is_refused_since_it_stands_for_both() -> None:
    with pytest.raises(SelectionError, match="stands for 2 backends"):
        get_registry().backend_named("vllm")
