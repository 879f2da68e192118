"""The trainer's end of transport `collective`, against a scheduler's end of the same group."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightlane.contexts import BuildRequestsContext
from weightlane.errors import EngineError, PlanError, SyncTimeoutError
from weightlane.program import AnnouncedGroup, RequestMove
from weightlane.types import Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.announced_updates import AnnouncedUpdates
from weightlane_sglang.contract import (
    COLLECTIVE_FIELDS_USED,
    DESTROY_GROUP_ROUTE,
    DISTRIBUTED_REQUEST,
    DISTRIBUTED_ROUTE,
    INIT_GROUP_ROUTE,
)
from weightlane_sglang.update_group import serving_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane.facts import EngineFacts

MOVE = RequestMove(
    DISTRIBUTED_ROUTE, "", 1, '{"flush_cache":false}', '{"flush_cache":false}', 20.0, "collective",
    AnnouncedGroup("gloo", 1),
)  # fmt: skip
TENSORS = [("a.weight", torch.arange(6.0).reshape(2, 3)), ("b.bias", torch.tensor([1, 2], dtype=torch.int64))]


def scheduler(commands: Any, answers: Any) -> None:
    """Makes its end as SGLang does, by torch's helper for named groups, and takes what it is told of."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, rendezvous

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    bound = timedelta(seconds=20)
    groups: dict[str, Any] = {}
    while (command := commands.get()) is not None:
        kind, fields = command
        name = fields["group_name"]
        if kind == "join":
            address = f"tcp://{fields['master_address']}:{fields['master_port']}"
            store, rank, size = next(
                rendezvous(address, fields["rank_offset"], fields["world_size"], timeout=bound)
            )
            groups[name], _ = _new_process_group_helper(
                size,
                rank,
                [],
                Backend(fields["backend"]),
                PrefixStore(name, store),
                group_name=name,
                timeout=bound,
            )
            answers.put("joined")
        elif kind == "leave":
            groups.pop(name, None)
            answers.put("left")
        else:
            taken = []
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            for dtype, shape in zip(fields["dtypes"], fields["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                groups[name].broadcast([tensor], options).wait()
                taken.append(tensor.tolist())
            answers.put(dict(zip(fields["names"], taken, strict=True)))


class FakeChannel:
    """A server's HTTP side: hands each request to the scheduler, or refuses it."""

    url, host = "http://127.0.0.1:1", "127.0.0.1"

    def __init__(self, commands: Any, answers: Any) -> None:
        self._commands, self._answers = commands, answers
        self.refused: set[str] = set()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.loaded: dict[str, Any] = {}

    def send(self, method: str, route: str, *, timeout_seconds: float, body: Any, length: int) -> bytes:
        del method, length
        import json

        fields = json.loads(b"".join(body))
        self.asked.append((route, fields))
        if route in self.refused:
            time.sleep(0.2)  # the broadcast has begun by then
            raise EngineError(f"{route} with status 400: must run between begin and end")
        kind = {INIT_GROUP_ROUTE: "join", DESTROY_GROUP_ROUTE: "leave"}.get(route, "take")
        self._commands.put((kind, fields))
        answer = self._answers.get(timeout=timeout_seconds)
        if kind == "take":
            self.loaded.update(answer)
        return b"{}"


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeChannel]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    spawn = multiprocessing.get_context("spawn")
    commands, answers = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=scheduler, args=(commands, answers), daemon=True)
    process.start()
    yield FakeChannel(commands, answers)
    commands.put(None)
    process.join(20)
    process.kill()


@pytest.mark.timeout(120)
def test_buckets_arrive_a_refusal_ends_the_broadcast_and_the_next_group_has_another_name(
    channel: FakeChannel,
) -> None:
    updates = AnnouncedUpdates(channel)  # type: ignore[arg-type]
    assert MOVE.group is not None
    updates.send(MOVE, MOVE.group, MOVE.body, TENSORS)
    assert channel.loaded == {"a.weight": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], "b.bias": [1, 2]}
    (_, init), (_, told) = channel.asked
    assert (init["rank_offset"], init["world_size"], init["master_address"]) == (1, 2, "127.0.0.1")
    assert told["dtypes"] == ["float32", "int64"]
    assert told["shapes"] == [[2, 3], [2]]
    assert told["group_name"] == init["group_name"]
    assert told["flush_cache"] is False

    channel.refused = {DISTRIBUTED_ROUTE}
    began = time.monotonic()
    with pytest.raises(EngineError, match="must run between"):
        updates.send(MOVE, MOVE.group, MOVE.body, TENSORS)
    assert time.monotonic() - began < 5, "a control: alone in it, it would wait for 20 s"
    assert [route for route, _ in channel.asked[-2:]] == [DISTRIBUTED_ROUTE, DESTROY_GROUP_ROUTE]

    channel.refused, channel.loaded = set(), {}
    updates.send(MOVE, MOVE.group, MOVE.body, TENSORS)
    assert set(channel.loaded) == {"a.weight", "b.bias"}
    assert channel.asked[-1][1]["group_name"] != init["group_name"]
    updates.leave()
    assert channel.asked[-1][0] == DESTROY_GROUP_ROUTE
    asked = len(channel.asked)
    updates.leave()
    assert len(channel.asked) == asked, "it is left once"


class Refusing:
    """A server that refuses a group at once."""

    url, host = "http://127.0.0.1:1", "127.0.0.1"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def send(self, method: str, route: str, **rest: Any) -> bytes:
        del method, rest
        self.asked.append(route)
        raise EngineError(f"{route} with status 400: no")


def test_a_group_that_is_refused_is_not_waited_for() -> None:
    server = Refusing()
    began = time.monotonic()
    assert MOVE.group is not None
    with pytest.raises(EngineError, match=f"{INIT_GROUP_ROUTE} with status 400"):
        AnnouncedUpdates(server).send(MOVE, MOVE.group, MOVE.body, TENSORS)  # type: ignore[arg-type]
    assert time.monotonic() - began < 5
    assert server.asked == [INIT_GROUP_ROUTE, DESTROY_GROUP_ROUTE]


def test_the_store_is_served_where_the_server_reaches_it_alone() -> None:
    assert serving_address("127.0.0.1") == "127.0.0.1"
    assert serving_address("localhost") == "127.0.0.1"


def program(facts: EngineFacts, era: int = 0) -> Any:
    descriptor = plugin.weightlane_register_backends()[era]
    context = BuildRequestsContext(
        descriptor, facts, Phase.FULL, TransportName.COLLECTIVE, (), (), (), "counts"
    )
    return plugin.weightlane_build_requests(context)


@pytest.fixture
def collective_facts(facts_of: Callable[..., EngineFacts]) -> Callable[..., EngineFacts]:
    def make(**changes: Any) -> EngineFacts:
        known = facts_of()
        routes = (*known.routes, DISTRIBUTED_ROUTE, INIT_GROUP_ROUTE, DESTROY_GROUP_ROUTE)
        fields = {**known.request_fields, **COLLECTIVE_FIELDS_USED}
        return facts_of(**{"routes": routes, "request_fields": fields, "device": "cpu", **changes})

    return make


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_the_group_has_one_rank_per_scheduler_after_the_controller(
    collective_facts: Callable[..., EngineFacts], device: str, backend: str
) -> None:
    made = program(collective_facts(device=device))
    assert made.move.group == AnnouncedGroup(backend, 2)
    assert made.move.transport == "collective"
    assert ("has not been run" in " ".join(made.notes)) == (backend == "nccl")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"device": "xpu"}, "device 'xpu'"),
        ({"routes": (DISTRIBUTED_ROUTE, INIT_GROUP_ROUTE)}, DESTROY_GROUP_ROUTE),
        (
            {"request_fields": {DISTRIBUTED_REQUEST: ("name", "dtype", "shape")}},
            "InitWeightsUpdateGroupReqInput",
        ),
    ],
)
def test_a_server_that_cannot_make_the_group_is_refused_by_name(
    collective_facts: Callable[..., EngineFacts], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(PlanError, match=match):
        program(collective_facts(**changes))


def test_one_tensor_that_is_not_taken_ends_within_its_bound(channel: FakeChannel) -> None:
    """Nobody refuses and nobody takes part: the announcement is never answered."""
    updates = AnnouncedUpdates(channel)  # type: ignore[arg-type]
    assert MOVE.group is not None
    updates.send(MOVE, MOVE.group, MOVE.body, TENSORS)

    def hang(method: str, route: str, **rest: Any) -> bytes:
        del method, rest
        if route == DISTRIBUTED_ROUTE:
            time.sleep(3)
        return b"{}"

    channel.send = hang  # type: ignore[method-assign]
    short = RequestMove(DISTRIBUTED_ROUTE, "", 1, "{}", "{}", 1.0, "collective", MOVE.group)
    began = time.monotonic()
    with pytest.raises(SyncTimeoutError, match="was not taken"):
        updates.send(short, MOVE.group, MOVE.body, TENSORS)
    assert time.monotonic() - began < 4
