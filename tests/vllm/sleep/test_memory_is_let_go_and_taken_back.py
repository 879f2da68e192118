"""Each tag is released and resumed once, in an order that vLLM obeys; its workers are asked if it did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sleeping_llm import FakeSleepingLlm, FakeSleepingWorker, sleeping_facts

from weightlane.errors import EngineError, NotServableError, SyncError
from weightlane_vllm.llm_calls import LlmCalls
from weightlane_vllm.sleep_calls import EngineMemory
from weightlane_vllm.sleep_watch import CalledSleep, SleepWatch
from weightlane_vllm.worker import VllmWorkerEngine

if TYPE_CHECKING:
    from collections.abc import Callable

NEWER, OLDER = sleeping_facts(), sleeping_facts(cache_alone=False)

SECONDS = 10.0


def called(llm: FakeSleepingLlm, memory: EngineMemory, *routes: str) -> list[str]:
    del llm.calls[:]
    for route in routes:
        memory.call(route, SECONDS)
    return llm.calls


def pair(*, newer: bool) -> tuple[FakeSleepingLlm, EngineMemory]:
    llm = FakeSleepingLlm(NEWER if newer else OLDER)
    return llm, memory_of(llm, newer=newer)


def memory_of(llm: FakeSleepingLlm, *, newer: bool) -> EngineMemory:
    return EngineMemory(LlmCalls(llm), cache_alone=newer)


@pytest.mark.requirement("R78")
@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("level", [1, 2])
def test_a_whole_sleep_is_one_call_and_each_tag_wakes_by_its_own(newer: bool, level: int) -> None:
    llm, memory = pair(newer=newer)
    release = (f"release_weights_level_{level}", "release_kv_cache")
    assert called(llm, memory, *release) == [f"sleep({level})"]
    assert called(llm, memory, "resume_weights", "resume_kv_cache") == [
        "wake_up(weights)",
        "wake_up(kv_cache)",
    ]
    assert called(llm, memory, *release) == [f"sleep({level})"], "and again"


@pytest.mark.requirement("R78")
def test_the_cache_alone_is_let_go_by_its_own_call_where_there_is_one() -> None:
    llm, memory = pair(newer=True)
    assert called(llm, memory, "release_kv_cache") == ["sleep(0)", "release_kv_cache_memory()"]
    assert called(llm, memory, "resume_kv_cache") == ["wake_up(kv_cache)"]
    llm, memory = pair(newer=False)
    assert called(llm, memory, "release_kv_cache") == ["sleep(1)", "wake_up(weights)"]
    assert called(llm, memory, "resume_kv_cache") == ["wake_up(kv_cache)"]
    memory.require_awake(SECONDS)


@pytest.mark.parametrize("newer", [True, False])
def test_weights_follow_a_cache_that_was_let_go_before(newer: bool) -> None:
    llm, memory = pair(newer=newer)
    memory.call("release_kv_cache", SECONDS)
    expected = ["sleep(2)"] if newer else ["wake_up(kv_cache)", "sleep(2)"]
    assert called(llm, memory, "release_weights_level_2") == expected
    assert memory.call("resume_weights", SECONDS) == "released: kv_cache"


@pytest.mark.requirement("R78")
@pytest.mark.parametrize(
    ("before", "route", "why"),
    [
        ((), "resume_weights", "weights cannot be resumed: it is not released"),
        ((), "resume_kv_cache", "kv_cache cannot be resumed: it is not released"),
        (("release_kv_cache",), "release_kv_cache", "kv_cache cannot be released: it is released already"),
        (("release_kv_cache",), "resume_weights", "weights cannot be resumed: it is not released"),
        (("release_weights_level_1",), "release_weights_level_1", "released already"),
        (
            ("release_weights_level_1", "release_kv_cache"),
            "release_kv_cache",
            "kv_cache cannot be released: it is released already",
        ),
        (("release_weights_level_2",), "resume_kv_cache", "kv_cache cannot be resumed before weights"),
    ],
)
def test_only_what_was_released_is_resumed_once_and_weights_first(
    before: tuple[str, ...], route: str, why: str
) -> None:
    llm, memory = pair(newer=True)
    for call in before:
        memory.call(call, SECONDS)
    del llm.calls[:]
    with pytest.raises(EngineError, match=why):
        memory.call(route, SECONDS)
    assert llm.calls == []


@pytest.mark.parametrize("route", ["release_kv_cache", "release_weights_level_2"])
def test_an_engine_that_ignores_the_call_is_not_believed(route: str) -> None:
    llm = FakeSleepingLlm(NEWER, obeys="nothing")
    with pytest.raises(EngineError, match=r"did not do what \w+ asks: nothing is released"):
        memory_of(llm, newer=True).call(route, SECONDS)


def test_workers_that_differ_are_an_error() -> None:
    llm, memory = pair(newer=True)
    memory.call("release_kv_cache", SECONDS)
    llm.workers[1].wake_up(["kv_cache"])
    with pytest.raises(EngineError, match="worker 0 kv_cache; worker 1 nothing"):
        memory.call("resume_kv_cache", SECONDS)


@pytest.mark.requirement("R78")
def test_nothing_is_generated_asleep_nor_from_weights_that_were_lost() -> None:
    llm, memory = pair(newer=True)
    memory.require_awake(SECONDS)
    memory.call("release_weights_level_2", SECONDS)
    with pytest.raises(NotServableError, match="has released kv_cache, weights"):
        memory.require_awake(SECONDS)
    memory.call("resume_weights", SECONDS)
    memory.call("resume_kv_cache", SECONDS)
    with pytest.raises(NotServableError, match="no full sync has written them since it woke"):
        memory.require_awake(SECONDS)
    for worker in llm.workers:
        worker._weightlane_sleep_watch.rewritten()
    memory.require_awake(SECONDS)


def by_its_records(worker: FakeSleepingWorker) -> SleepWatch:
    return worker._weightlane_sleep_watch


def by_its_calls(worker: FakeSleepingWorker) -> SleepWatch:
    """As in 0.23, whose records have no `is_asleep`."""
    worker._weightlane_sleep_watch.undo()
    kept = ("tag", "cpu_backup_tensor")
    watch = CalledSleep(
        worker,
        lambda: [SimpleNamespace(**{name: getattr(it, name) for name in kept}) for it in worker.records],
    )
    watch.apply()
    return watch


@pytest.mark.parametrize("watch_of", [by_its_records, by_its_calls])
def test_what_is_released_is_known_tag_by_tag(watch_of: Callable[[FakeSleepingWorker], SleepWatch]) -> None:
    worker = FakeSleepingWorker(0)
    watch = watch_of(worker)
    assert watch.released() == ()
    worker.sleep(level=1)
    assert watch.released() == ("weights", "kv_cache")
    worker.wake_up(["weights"])
    assert watch.released() == ("kv_cache",)
    worker.wake_up(["kv_cache"])
    assert watch.released() == ()
    assert watch.why_lost() == ""


@pytest.mark.parametrize("watch_of", [by_its_records, by_its_calls])
def test_a_sleep_of_somebody_else_is_noticed_though_it_is_over(
    watch_of: Callable[[FakeSleepingWorker], SleepWatch],
) -> None:
    worker = FakeSleepingWorker(0)
    watch = watch_of(worker)
    for level, lost in ((1, False), (2, True)):
        worker.sleep(level=level)
        worker.wake_up(None)
        assert watch.released() == ()
        assert bool(watch.why_lost()) is lost
    watch.rewritten()
    watch.undo()
    watch.undo()
    worker.sleep(level=2)
    worker.wake_up(None)
    assert watch.why_lost() == "", "what the wrapper is there for"
    watch.apply()
    watch.apply()
    worker.sleep(2)
    worker.wake_up(None)
    assert watch.why_lost()


def test_what_no_sync_writes_stays_lost_with_the_reason() -> None:
    """As a drafter that keeps its own weights, let go without a copy by somebody else."""
    worker = FakeSleepingWorker(0)
    watch = by_its_records(worker)
    kept = "the eagle3 drafter keeps its own weights, as loaded from /eagle3"
    watch.rewritten(but=kept)
    assert watch.why_lost() == "", "nothing was lost"
    worker.sleep(level=2)
    worker.wake_up(None)
    watch.rewritten(but=kept)
    assert kept in watch.why_lost()
    assert "Start the engine again." in watch.why_lost()
    watch.rewritten()
    assert watch.why_lost() == ""


_LOAD: Any = SimpleNamespace(ref=SimpleNamespace(name="default@1"))


@pytest.mark.requirement("R80")
@pytest.mark.parametrize(
    "step",
    [
        lambda engine: engine.begin(1),
        lambda engine: engine.load_adapter(_LOAD),
        lambda engine: engine.remove_adapter("0"),
        lambda engine: engine.trace(()),
    ],
    ids=["full weights", "adapter", "adapter slot", "trace"],
)
def test_a_worker_touches_no_weights_that_are_released(step: Callable[[VllmWorkerEngine], object]) -> None:
    worker = FakeSleepingWorker(0)
    engine = VllmWorkerEngine(worker)
    worker.sleep(level=1)
    assert engine.released() == ("weights", "kv_cache")
    with pytest.raises(SyncError, match="this vLLM worker: its weights are released"):
        step(engine)
    assert engine.why_not_whole() == ""
