"""Weights that vLLM's own calls write under a lane are no base and no version until a full sync."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightlane_vllm.foreign_writes import ForeignWrites, foreign_writes_of
from weightlane_vllm.worker import VllmWorkerEngine


class FakeWorker:
    """The calls of vLLM's worker that write its weights, and one that does not."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=False))
        self.written: list[Any] = []

    def reload_weights(self, *arguments: Any, **named: Any) -> str:
        self.written.append((arguments, named))
        return "reloaded"

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.written.append(update_info)
        raise RuntimeError("in the middle")

    def finish_weight_update(self) -> None: ...


@pytest.mark.parametrize("call", ["reload_weights", "update_weights"])
def test_a_base_that_others_wrote_is_none_until_a_full_sync(call: str) -> None:
    worker = FakeWorker()
    engine = VllmWorkerEngine(worker)
    assert engine.why_not_whole() == ""
    worker.finish_weight_update()
    assert engine.why_not_whole() == ""
    if call == "reload_weights":
        assert worker.reload_weights("here", deep=True) == "reloaded"
        assert worker.written == [(("here",), {"deep": True})]
    else:
        with pytest.raises(RuntimeError, match="in the middle"):
            worker.update_weights({"names": []})
    assert engine.why_not_whole() == f"{call} of vLLM has written its weights, and no full sync since."
    assert VllmWorkerEngine(worker).why_not_whole(), "whoever asks"
    foreign_writes_of(worker).rewritten()
    assert engine.why_not_whole() == ""


def test_a_worker_is_wrapped_once_and_can_be_put_back() -> None:
    worker = FakeWorker()
    watch = foreign_writes_of(worker)
    assert foreign_writes_of(worker) is watch
    first = worker.reload_weights
    watch.apply()
    assert worker.reload_weights is first
    watch.undo()
    watch.undo()
    assert not {"reload_weights", "update_weights"} & vars(worker).keys()
    worker.reload_weights()
    assert watch.why_unknown() == ""


def test_a_worker_without_such_calls_is_left_as_it_is() -> None:
    worker = SimpleNamespace()
    watch = ForeignWrites(worker)
    watch.apply()
    watch.undo()
    assert vars(worker) == {}
