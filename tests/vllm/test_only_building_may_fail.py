"""A model that cannot be built is untraced with the reason; a defect of the trace is not taken for one."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.contexts import TraceModelContext
from weightlane.facts import EngineFacts
from weightlane.trace.table import Untraced
from weightlane_vllm import meta_model, tracing


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> TraceModelContext:
    monkeypatch.setattr(meta_model, "installed_version", lambda names: "0.32.0")
    nothing: Any = None
    return TraceModelContext(nothing, EngineFacts("vllm", "0.32.0", "installed"), "model", ())


def test_what_building_raises_is_the_reason(
    context: TraceModelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("Cannot copy out of meta tensor\nmore")

    monkeypatch.setattr(meta_model, "_built", broken)
    answer = meta_model.trace_model(context)
    assert isinstance(answer, Untraced)
    assert answer.reason == (
        "vLLM's model cannot be built on the meta device for worker 0 of 1: RuntimeError: Cannot copy out of "
        "meta tensor"
    )


def test_what_the_trace_raises_is_raised(context: TraceModelContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: Any) -> Any:
        raise AttributeError("of ours")

    monkeypatch.setattr(meta_model, "_built", lambda *_: (None, None))
    monkeypatch.setattr(tracing, "table_key", lambda *_, **__: None)
    monkeypatch.setattr(tracing, "trace_of", defect)
    with pytest.raises(AttributeError, match="of ours"):
        meta_model.trace_model(context)
