"""The plugin's own requests against a live server, without a lane: what each does, and why it is there."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.errors import EngineError
from weightlane.probes import Viable
from weightlane.program import EngineCall
from weightlane_sglang.probes import probe_updates_without_session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightlane.program import Program
    from weightlane_sglang.endpoint import SglangEndpoint
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))
TOKENS = 12
AGREES = 1e-4
MOVED = 1e-2


def sync(
    endpoint: SglangEndpoint, program: Program, trainer: Any, version: int, *, settle: bool = True
) -> None:
    tensors = trainer.tensors()
    for call in program.pause:
        endpoint.call(call)
    endpoint.send_bucket(program.move, tensors[:9], last=False, version=version)
    endpoint.send_bucket(program.move, tensors[9:], last=True, version=version)
    for call in program.settle if settle else ():
        endpoint.call(call)
    for call in program.publish:
        endpoint.call(call, version=version)
    for call in program.resume:
        endpoint.call(call)


@pytest.fixture
def endpoint(
    tiny_server: RunningServer, open_server: Callable[[RunningServer], SglangEndpoint]
) -> SglangEndpoint:
    return open_server(tiny_server)


def test_the_server_is_recognised_by_what_it_lists(endpoint: SglangEndpoint) -> None:
    facts = endpoint.facts()
    assert facts.version.startswith("0.5.18")
    assert isinstance(probe_updates_without_session(facts), Viable)
    (first,), (second,) = endpoint.describe_workers("sglang"), endpoint.describe_workers("sglang")
    assert first.incarnation == second.incarnation
    assert len(first.expected) == 25


def test_three_syncs_each_move_and_match_the_trainer(
    endpoint: SglangEndpoint,
    program_of: Callable[[SglangEndpoint], Program],
    trainer_of: Callable[[Path], Any],
    tiny_folder: Path,
) -> None:
    trainer = trainer_of(tiny_folder)
    program = program_of(endpoint)
    for version in (1, 2, 3):
        assert trainer.change(seed=version) >= MOVED
        assert trainer.distance(PROMPTS, endpoint.generate(PROMPTS, max_tokens=TOKENS)) >= MOVED
        sync(endpoint, program, trainer, version)
        generations = endpoint.generate(PROMPTS, max_tokens=TOKENS)
        assert trainer.distance(PROMPTS, generations) <= AGREES
        assert {generation.weight_version for generation in generations} == {version}
        assert endpoint.describe_workers("sglang")[0].held_version == version


@pytest.mark.requirement("R82")
def test_without_the_flush_a_prefix_cached_by_the_old_weights_answers(
    endpoint: SglangEndpoint,
    program_of: Callable[[SglangEndpoint], Program],
    trainer_of: Callable[[Path], Any],
    tiny_folder: Path,
) -> None:
    trainer = trainer_of(tiny_folder)
    program = program_of(endpoint)
    long_prompt = (tuple(range(3, 103)),)
    sync(endpoint, program, trainer, 20)
    endpoint.generate(long_prompt, max_tokens=4)
    assert trainer.change(seed=20) >= MOVED
    sync(endpoint, program, trainer, 21, settle=False)
    assert trainer.distance(long_prompt, endpoint.generate(long_prompt, max_tokens=4)) > AGREES
    sync(endpoint, program, trainer, 22)
    assert trainer.distance(long_prompt, endpoint.generate(long_prompt, max_tokens=4)) <= AGREES


def test_a_request_in_flight_is_aborted_and_one_that_comes_meanwhile_waits(
    endpoint: SglangEndpoint,
    program_of: Callable[[SglangEndpoint], Program],
    trainer_of: Callable[[Path], Any],
    tiny_folder: Path,
) -> None:
    trainer = trainer_of(tiny_folder)
    program = program_of(endpoint)
    outcomes: dict[str, Any] = {}

    def generate(name: str, tokens: int) -> None:
        try:
            outcomes[name] = endpoint.generate(PROMPTS[:1], max_tokens=tokens)
        except EngineError as error:
            outcomes[name] = error

    running = threading.Thread(target=generate, args=("in flight", 200))
    running.start()
    time.sleep(0.7)
    for call in program.pause:
        endpoint.call(call)
    running.join(30)
    assert isinstance(outcomes["in flight"], EngineError), "200 tokens take longer than the wait above"
    assert "aborted" in str(outcomes["in flight"])
    waiting = threading.Thread(target=generate, args=("meanwhile", TOKENS))
    waiting.start()
    trainer.change(seed=30)
    sync(endpoint, program, trainer, 30)
    waiting.join(60)
    meanwhile = outcomes["meanwhile"]
    assert trainer.distance(PROMPTS[:1], meanwhile) <= AGREES, "it saw the new weights only"
    assert meanwhile[0].weight_version == 30


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (EngineCall("/no_such_route"), r"/no_such_route with status 404"),
        (EngineCall("/pause_generation", '{"mode":"gently"}'), r"/pause_generation with status 4.*mode"),
        (EngineCall("/update_weight_version", "{}"), r"/update_weight_version with status 4.*new_version"),
        (
            EngineCall("/update_weights_from_tensor", '{"serialized_named_tensors":["?"]}'),
            r"/update_weights_from_tensor with status 4.*serialized_named_tensors",
        ),
    ],
)
def test_a_refused_request_is_told_in_the_server_s_words(
    endpoint: SglangEndpoint, call: EngineCall, match: str
) -> None:
    with pytest.raises(EngineError, match=match):
        endpoint.call(call)
    assert endpoint.generate(PROMPTS[:1], max_tokens=2), "the server lives on"
