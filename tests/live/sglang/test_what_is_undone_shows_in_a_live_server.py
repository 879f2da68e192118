"""Negative controls: each thing that is done for SGLang's adapters, undone, shows its own symptom live."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from changing_trainers import AdapterTrainer

import weightlane as wl
from weightlane.adapters import AdapterRef
from weightlane.errors import EngineDeadError, EngineError, VerificationError
from weightlane_sglang.adapter_contract import UNLOAD_ROUTE
from weightlane_sglang.adapter_proof import binding_of
from weightlane_sglang.adapter_shelf import ServerAdapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightlane.adapter_engine import AdapterLoad
    from weightlane.program import AdapterMove
    from weightlane_sglang.endpoint import SglangEndpoint
    from weightlane_sglang.launch import RunningServer

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]

PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99))
TOKENS = 6
MOVED = 1e-2
AGREES = 1e-4
UNDONE = AdapterRef("undone@1", 1)


class Sent:
    """What a lane really sent, for a test to send it again with one thing undone."""

    def __init__(self, endpoint: SglangEndpoint, trainer: Any, move: AdapterMove, load: AdapterLoad) -> None:
        self.endpoint, self.trainer = endpoint, trainer
        self.shelf: Any = endpoint._adapters
        self.move, self.load = move, replace(load, ref=UNDONE)

    def send(self, load: AdapterLoad, **changes: Any) -> None:
        import msgspec

        self.shelf._send(msgspec.structs.replace(self.move, **changes), load)

    def send_and_use(self, load: AdapterLoad, **changes: Any) -> None:
        self.send(load, **changes)
        self.endpoint.generate(PROMPTS, max_tokens=1, adapter=UNDONE)

    def distance(self) -> float:
        said = self.endpoint.generate(PROMPTS, max_tokens=TOKENS, adapter=UNDONE)
        return float(self.trainer.truth(PROMPTS, TOKENS).distance(said))

    def with_config(self, **fields: Any) -> AdapterLoad:
        return replace(self.load, wire=json.dumps({**json.loads(self.load.wire), **fields}))


def sent_to(server: RunningServer, trainer: Any) -> Iterator[Sent]:
    seen: list[tuple[AdapterMove, AdapterLoad]] = []
    whole = ServerAdapters.load

    def load(self: Any, move: AdapterMove, given: AdapterLoad, *, held: bool) -> Any:
        seen.append((move, given))
        return whole(self, move, given, held=held)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerAdapters, "load", load)
        with wl.connect(
            trainer=wl.trainer("torch", model=trainer.model),
            rollout=[wl.rollout("sglang", url=server.url)],
            mode="adapter",
        ) as lane:
            assert trainer.change(seed=3) >= MOVED
            lane.sync(version=1)
            endpoint: Any = lane.replicas[0]
            yield Sent(endpoint, trainer, *seen[0])


@pytest.fixture(scope="module")
def sent_once(lora_server: RunningServer, tiny_folder: Path) -> Iterator[Sent]:
    yield from sent_to(lora_server, AdapterTrainer(tiny_folder, use_rslora=True))


@pytest.fixture
def sent(sent_once: Sent) -> Iterator[Sent]:
    yield sent_once
    if UNDONE.name in sent_once.shelf._loaded_names():
        sent_once.shelf._unload(UNDONE.name, 60.0)


def proof(sent: Sent, load: AdapterLoad) -> Any:
    return binding_of(sent.endpoint._channel, sent.endpoint.facts(), load, held=False, seconds=60.0)


def test_with_nothing_undone_it_is_bound_and_agrees(sent: Sent) -> None:
    sent.endpoint._channel.send("POST", "/freeze_gc", timeout_seconds=60.0)  # as SGLang does once it is warm
    sent.send(sent.load)
    assert len(proof(sent, sent.load).modules) == len(sent.load.config.target_modules)
    assert sent.distance() <= AGREES


def test_a_rank_stabilised_scale_that_is_not_folded_answers_wrongly_and_is_told(
    sent: Sent,
) -> None:
    undone = sent.with_config(lora_alpha=8, use_rslora=True)  # as peft's own configuration has it
    sent.send(undone)
    assert sent.distance() >= MOVED
    assert {item.scaling for item in proof(sent, undone).modules} != {sent.load.config.scaling}


def test_names_that_sglang_drops_are_a_success_to_it_and_an_error_of_the_proof(sent: Sent) -> None:
    tensors = {name.replace(".layers.", ".blocks."): tensor for name, tensor in sent.load.tensors.items()}
    sent.send(replace(sent.load, tensors=tensors))
    with pytest.raises(VerificationError, match="TP rank 0: SGLang keeps nothing for"):
        proof(sent, sent.load)


def test_one_changed_value_is_an_error_of_the_proof(sent: Sent) -> None:
    name = next(iter(sent.load.tensors))
    changed = sent.load.tensors[name].clone()
    changed[0, 0] += 1e-3
    sent.send(replace(sent.load, tensors={**sent.load.tensors, name: changed}))
    with pytest.raises(VerificationError, match="keeps other values of lora_A"):
        proof(sent, sent.load)


@pytest.mark.requirement("R35")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 64}, "rank 64 is incompatible"),
        ({"target_modules": list("all-linear")}, "incompatible"),
        ({"target_modules": ["o_project"]}, "incompatible"),
    ],
)
def test_what_the_server_was_not_launched_for_is_refused_in_its_own_words(
    sent: Sent, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=f"status 400.*{words}"):
        sent.send(sent.with_config(**fields))


def test_without_peft_type_the_server_names_the_key(sent: Sent) -> None:
    config = json.loads(sent.load.wire)
    del config["peft_type"]
    with pytest.raises(EngineError, match=r"status 400.*peft_type"):
        sent.send(replace(sent.load, wire=json.dumps(config)))


@pytest.mark.requirement("R30")
def test_a_field_of_another_era_is_refused(sent: Sent) -> None:
    with pytest.raises(EngineError, match="status 4"):
        sent.send(sent.load, payload_field="serialized_tensors", copies=0)


def test_the_canary_tells_an_adapter_that_is_bound_to_nothing(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane_sglang.adapter_proof.why_not_asked", lambda _: "nobody is there")
    tensors = {name.replace(".layers.", ".blocks."): tensor for name, tensor in sent.load.tensors.items()}
    sent.send(replace(sent.load, tensors=tensors))
    with pytest.raises(VerificationError, match="exactly as with the base"):
        proof(sent, sent.load)
    sent.shelf._unload(UNDONE.name, 60.0)
    sent.send(sent.load)
    assert "log-probs by up to" in proof(sent, sent.load).unread


KILLS = ("a list shorter than TP", "a key without its query", "a wrong shape")


@pytest.mark.long_run  # each ends its server
@pytest.mark.requirement("R31")
@pytest.mark.parametrize("undone", KILLS)
def test_what_is_checked_here_would_end_the_server(
    start_server: Any, tiny_folder: Path, adapter_trainer_of: Callable[..., Any],
    lora_arguments: tuple[str, ...], undone: str,
) -> None:  # fmt: skip
    ranks = 2 if undone == KILLS[0] else 1
    with start_server(tiny_folder, ranks, arguments=lora_arguments) as server:
        for sent in sent_to(server, adapter_trainer_of(tiny_folder)):
            tensors = dict(sent.load.tensors)
            if undone == KILLS[1]:
                tensors = {n: tensor for n, tensor in tensors.items() if ".q_proj." not in n}
            elif undone == KILLS[2]:
                name = next(name for name in tensors if ".down_proj.lora_A." in name)
                tensors[name] = torch.zeros(4, 3)
            undone_load = replace(sent.load, tensors=tensors)
            with pytest.raises(EngineDeadError, match=r"is gone|hangs"):
                sent.send_and_use(undone_load, copies=1)
            with pytest.raises(EngineDeadError, match=UNLOAD_ROUTE):
                sent.shelf._unload(UNDONE.name, 20.0)
