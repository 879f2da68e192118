"""An `sgl.Engine` of this process: requests become objects of its own classes, on its own event loop."""

from __future__ import annotations

import asyncio
import base64
import gc
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from fake_sgl_engine import STRUCTS, VERSION, FakeEngine, UpdateOfOld, install

from weightlane.contexts import FactsContext, RolloutTarget
from weightlane.errors import EngineDeadError, EngineError
from weightlane_sglang import plugin
from weightlane_sglang.adapter_contract import LOAD_ROUTE, MODELS_ROUTE, UNLOAD_ROUTE
from weightlane_sglang.beside import Beside
from weightlane_sglang.contract import (
    CONTINUE_ROUTE,
    GENERATE_ROUTE,
    MODEL_INFO_ROUTE,
    PAUSE_ROUTE,
    SERVER_INFO_ROUTE,
    UPDATE_REQUEST,
    UPDATE_ROUTE,
    VERSION_ROUTE,
)
from weightlane_sglang.engine_channel import EngineChannel
from weightlane_sglang.engine_requests import RequestClasses
from weightlane_sglang.payload import PayloadPlace
from weightlane_sglang.probes import probe_untimed_flush, probe_updates_without_session

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = '{"load_format":null,"flush_cache":false,"abort_all_requests":false}'
PLACE = PayloadPlace("serialized_named_tensors", 2)
TENSORS = [("a.weight", torch.arange(6.0).reshape(2, 3))]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    install(monkeypatch)
    made = FakeEngine()
    yield made
    made.shutdown()


@pytest.fixture
def channel(engine: FakeEngine) -> EngineChannel:
    return EngineChannel(engine)


def post(channel: EngineChannel, route: str, body: bytes = b"{}", seconds: float = 5.0) -> bytes:
    return channel.send("POST", route, timeout_seconds=seconds, body=(body,), length=len(body))


def update(channel: EngineChannel, seconds: float = 5.0) -> bytes:
    return channel.send_tensors(UPDATE_ROUTE, TENSORS, place=PLACE, body=BODY, timeout_seconds=seconds)


@pytest.mark.parametrize("shape", [STRUCTS.UpdateWeightsFromTensorReqInput, UpdateOfOld])
def test_an_update_is_the_engine_s_own_object_in_both_shapes(
    engine: FakeEngine, channel: EngineChannel, monkeypatch: pytest.MonkeyPatch, shape: type
) -> None:
    monkeypatch.setattr(STRUCTS, UPDATE_REQUEST, shape)
    assert b'"success":true' in update(channel)
    (request,) = engine.tokenizer_manager.got
    assert type(request) is shape
    assert (request.flush_cache, request.abort_all_requests) == (False, False)
    assert len(request.serialized_named_tensors) == 2, "one entry for each rank"
    for entry in request.serialized_named_tensors:
        ((name, tensor),) = pickle.loads(entry)  # noqa: S301 - our own
        assert name == "a.weight"
        assert torch.equal(tensor, TENSORS[0][1])


def test_a_field_that_the_class_does_not_have_is_named_with_those_that_it_has() -> None:
    classes = RequestClasses(STRUCTS, VERSION)
    with pytest.raises(EngineError, match="no field flush_cach ") as caught:
        classes.build(UPDATE_REQUEST, {"serialized_named_tensors": [], "flush_cach": False})
    assert "near it: flush_cache" in str(caught.value)
    assert "serialized_named_tensors, load_format, flush_cache, abort_all_requests" in str(caught.value)
    with pytest.raises(EngineError, match=r"cannot be made from load_format.*serialized_named_tensors"):
        classes.build(UPDATE_REQUEST, {"load_format": None})


def test_a_class_of_an_unknown_shape_or_none_is_told() -> None:
    class Plain:
        field = 1

    classes = RequestClasses(SimpleNamespace(Plain=Plain, word="x"), VERSION)
    for name, told in {"Plain": "unknown shape", "word": "unknown shape", "Gone": "is not there"}.items():
        with pytest.raises(EngineError, match=told):
            classes.fields(name)


def test_an_adapter_of_the_older_shape_is_one_text(engine: FakeEngine, channel: EngineChannel) -> None:
    place = PayloadPlace("serialized_tensors", 0)
    body = '{"lora_name":"default@1","config_dict":{"r":4}}'
    tensors = dict(TENSORS)
    told = channel.send_tensors(LOAD_ROUTE, tensors, place=place, body=body, timeout_seconds=5)
    assert b'"loaded_adapters":{"default@1":"path"}' in told
    (request,) = engine.tokenizer_manager.got
    assert isinstance(request.serialized_tensors, str)
    assert list(pickle.loads(base64.b64decode(request.serialized_tensors))) == ["a.weight"]  # noqa: S301
    assert b'{"id":"default@1","parent":"served"}' in channel.get(MODELS_ROUTE, timeout_seconds=5)


def test_pause_flush_version_and_facts_are_the_server_s_own(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    post(channel, PAUSE_ROUTE, b'{"mode":"retract"}')
    post(channel, "/flush_cache?timeout=30")
    post(channel, CONTINUE_ROUTE)
    pause, flushed, _ = engine.tokenizer_manager.got
    assert (pause.mode, flushed) == ("retract", 30.0)
    post(channel, VERSION_ROUTE, b'{"new_version":"7","abort_all_requests":false}')
    assert b'"weight_version":"7"' in channel.get(MODEL_INFO_ROUTE, timeout_seconds=5)
    info = channel.get(SERVER_INFO_ROUTE, timeout_seconds=5)
    assert b'"tp_size":2' in info
    assert b'"version":"0.5.18"' in info
    with pytest.raises(EngineError, match="requests run"):
        post(channel, "/flush_cache")


def test_facts_and_era_come_from_the_object(engine: FakeEngine) -> None:
    facts = plugin.weightlane_collect_facts(
        FactsContext("sglang", ("sglang",), RolloutTarget("sglang", handle=engine), ())
    )
    assert facts is not None
    assert (facts.version, facts.parallel.tensor) == (VERSION, 2)
    assert facts.launch_arguments["lora_target_modules"] == "q_proj v_proj"
    assert facts.request_fields["/flush_cache"] == ("timeout",)
    assert type(probe_updates_without_session(facts)).__name__ == "Viable"
    assert type(probe_untimed_flush(facts)).__name__ == "NotViable"


def test_refusals_carry_sglang_s_words_and_leave_no_noise(engine: FakeEngine, channel: EngineChannel) -> None:
    told: list[object] = []
    engine.loop.set_exception_handler(lambda _, context: told.append(context))
    engine.tokenizer_manager.answer = (False, "must run between begin_weight_update() and end")
    with pytest.raises(EngineError, match="must run between") as caught:
        update(channel)
    assert "must run between" in caught.value.what, "sessions are told by it"
    with pytest.raises(EngineError, match="ValueError: no prompt"):
        post(channel, GENERATE_ROUTE, b'{"input_ids":[]}')
    with pytest.raises(EngineError, match=r"has nothing for /begin_weight_update.*/generate"):
        post(channel, "/begin_weight_update")
    gc.collect()
    assert not told, "errors that asyncio calls never retrieved"


def test_a_call_that_hangs_is_told_in_time_and_goes_on_as_over_http(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    released = asyncio.Event()
    engine.tokenizer_manager.before = released.wait
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not answer POST /update_weights_from_tensor within 0 s"):
        update(channel, seconds=0.2)
    assert time.monotonic() - began < 3
    assert not engine.tokenizer_manager.got
    released.set()
    channel.get(SERVER_INFO_ROUTE, timeout_seconds=5)
    assert len(engine.tokenizer_manager.got) == 1, "it was not cancelled: its answer can meet no other call"


def test_calls_from_several_threads_all_end(engine: FakeEngine, channel: EngineChannel) -> None:
    engine.tokenizer_manager.before = lambda: asyncio.sleep(0.05)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: update(channel), range(8)))
    assert len(answers) == len(engine.tokenizer_manager.got) == 8


def test_a_loop_that_its_owner_runs_is_joined_and_not_run_twice(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    thread = threading.Thread(target=engine.loop.run_forever, daemon=True)
    thread.start()
    try:
        assert b"true" in update(channel)
    finally:
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        thread.join(5)
    assert b"true" in update(channel), "and it is run here once its owner has stopped"


def test_inside_a_coroutine_it_is_refused_and_waits_for_nothing(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    async def called() -> None:
        update(channel)

    with pytest.raises(EngineError, match=r"inside a coroutine.*lane\.aio"):
        engine.loop.run_until_complete(called())
    with pytest.raises(EngineError, match="inside a coroutine"):
        asyncio.run(called())
    assert not engine.tokenizer_manager.got


def test_an_unload_that_waits_leaves_the_loop_to_its_owner(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    """A thread of ours that ran the loop meanwhile would have SGLang refuse the owner's calls."""
    released = asyncio.Event()
    engine.tokenizer_manager.before = released.wait
    pending = channel.start(UNLOAD_ROUTE, b'{"lora_name":"default@1"}', timeout_seconds=3600)
    assert not pending.wait(0.05)
    assert engine.generate() == "text"
    released.set()
    with pytest.raises(EngineError, match="default@1 does not exist"):
        pending.wait(5)


def test_were_it_waited_for_beside_the_owner_s_call_would_be_refused(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    released = asyncio.Event()
    engine.tokenizer_manager.before = released.wait
    waiting = Beside(lambda: update(channel))
    while not engine.loop.is_running():
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="already running"):
        engine.generate()
    engine.loop.call_soon_threadsafe(released.set)
    assert waiting.wait(5)


def test_a_call_on_a_closed_loop_is_told(channel: EngineChannel, engine: FakeEngine) -> None:
    engine.loop.close()
    with pytest.raises(EngineError, match=r"event loop of SGLang at the Engine.*closed"):
        update(channel)
    engine.loop = asyncio.new_event_loop()


def test_a_dead_process_ends_a_call_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        engine = FakeEngine(child.pid)
        channel = EngineChannel(engine)
        engine.tokenizer_manager.before = lambda: asyncio.sleep(0 if child.poll() is None else 60)
        update(channel)
        threading.Timer(0.2, child.kill).start()
        engine.tokenizer_manager.before = lambda: asyncio.sleep(60)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=f"child process {child.pid} has ended") as caught:
            update(channel, seconds=30)
        assert time.monotonic() - began < 5
        assert "The last request it answered was POST /update_weights_from_tensor." in caught.value.why
        engine.shutdown()


def test_a_closed_handle_and_what_is_no_engine_are_refused(
    engine: FakeEngine, channel: EngineChannel
) -> None:
    channel.close()
    with pytest.raises(EngineError, match="is closed"):
        update(channel)
    assert engine.generate() == "text", "the engine goes on"
    with pytest.raises(EngineError, match=r"given a builtins.object.*no tokenizer_manager"):
        EngineChannel(object())
    engine.tokenizer_manager = None  # type: ignore[assignment]
    with pytest.raises(EngineError, match="NoneType, which takes no requests"):
        EngineChannel(engine)
