"""A whole lane into a fake server over real sockets: what it asks for, in which order, and how often."""

from __future__ import annotations

import base64
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import weightlane as wl
from weightlane.errors import EngineDeadError, EngineError, PlanError
from weightlane_sglang.contract import (
    CONTINUE_ROUTE,
    PAUSE_ROUTE,
    UPDATE_ROUTE,
    VERSION_ROUTE,
)

if TYPE_CHECKING:
    from weightlane.lane import Lane

FLUSH = "/flush_cache?timeout=30"
SYNC_ROUTES = (PAUSE_ROUTE, UPDATE_ROUTE, FLUSH, VERSION_ROUTE, CONTINUE_ROUTE)


@pytest.fixture
def tensors(lane_tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return lane_tensors


@pytest.fixture
def server(lane_server: Any) -> Any:
    return lane_server


def connect(server: Any, tensors: dict[str, torch.Tensor]) -> Lane:
    lane = wl.connect(
        trainer=wl.trainer("torch", model=tensors),
        rollout=[wl.rollout("sglang", url=server.url)],
        bucket_bytes=256,
    )
    server.requests.clear()
    return lane


def asked(server: Any) -> list[str]:
    return [route for _, route, _ in server.requests if route in SYNC_ROUTES]


@pytest.mark.requirement("R31")
@pytest.mark.requirement("R82")
@pytest.mark.requirement("R90", part="no LoRA, by requests at TP 1, 2 and 4")
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_each_bucket_goes_once_to_every_rank_and_the_cache_is_flushed_once_after_the_last(
    server: Any, answer: Any, tensors: dict[str, torch.Tensor], tensor_parallel: int
) -> None:
    told = server.answers["/server_info"].body
    server.answers["/server_info"] = answer({**told, "tp_size": tensor_parallel})
    with connect(server, tensors) as lane:
        buckets = len(lane.plan().buckets)
        assert buckets > 4
        for version in (1, 2):
            server.requests.clear()
            for tensor in tensors.values():
                tensor.add_(version)
            lane.sync(version=version)
            updates = [UPDATE_ROUTE] * buckets
            assert asked(server) == [PAUSE_ROUTE, *updates, FLUSH, VERSION_ROUTE, CONTINUE_ROUTE]
            bodies = server.bodies(UPDATE_ROUTE)
            assert not any(body["flush_cache"] for body in bodies)
            arrived: dict[str, torch.Tensor] = {}
            for body in bodies:
                payloads = body["serialized_named_tensors"]
                assert len(payloads) == tensor_parallel
                assert len(set(payloads)) == 1
                arrived.update(pickle.loads(base64.b64decode(payloads[0])))  # noqa: S301 - ours
            assert list(arrived) == list(tensors)
            assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())
        assert lane.published_version == 2


FAILURES = [
    ({"body": {"success": False, "message": "shape of embed"}}, EngineError, "shape of embed"),
    ({"body": {"detail": "out of memory"}, "status": 500}, EngineError, "500.*out of memory"),
    ({"hang_up": True}, EngineDeadError, UPDATE_ROUTE),
]


@pytest.mark.requirement("R36", part="nothing is retried")
@pytest.mark.requirement("R64")
@pytest.mark.requirement("R68", part="full weights")
@pytest.mark.parametrize(("bad", "kind", "told"), FAILURES, ids=["success false", "status 500", "hang-up"])
def test_a_bucket_that_fails_is_not_sent_again_and_the_server_stays_paused(
    server: Any,
    answer: Any,
    tensors: dict[str, torch.Tensor],
    bad: dict[str, Any],
    kind: type[Exception],
    told: str,
) -> None:
    with connect(server, tensors) as lane:
        server.answers.fail(UPDATE_ROUTE, 3, answer(**bad))
        started = time.monotonic()
        with pytest.raises(kind, match=told):
            lane.sync(version=1)
        assert time.monotonic() - started < 20
        assert asked(server) == [PAUSE_ROUTE, *[UPDATE_ROUTE] * 3]
        assert lane.published_version is None
    assert CONTINUE_ROUTE not in asked(server), "nor when the lane is closed"


@pytest.mark.requirement("R68", part="full weights")
@pytest.mark.requirement("R82")
def test_a_flush_that_fails_fails_the_sync_before_anything_is_published(
    server: Any, answer: Any, tensors: dict[str, torch.Tensor]
) -> None:
    with connect(server, tensors) as lane:
        server.answers.fail(FLUSH, 1, answer(b"Timed out waiting for idle state.", status=400))
        with pytest.raises(EngineError, match="Timed out waiting for idle state"):
            lane.sync(version=1)
        assert asked(server)[-2:] == [UPDATE_ROUTE, FLUSH]
        assert lane.published_version is None
        server.answers.fail("", 0, None)
        lane.sync(version=2)
        assert asked(server)[-3:] == [FLUSH, VERSION_ROUTE, CONTINUE_ROUTE]


@pytest.mark.parametrize("transport", ["disk", "shm"])
def test_a_transport_that_it_does_not_take_is_refused_by_name_before_any_write(
    server: Any, tensors: dict[str, torch.Tensor], transport: Any
) -> None:
    with pytest.raises(PlanError, match=transport) as caught:
        wl.connect(
            trainer=wl.trainer("torch", model=tensors),
            rollout=[wl.rollout("sglang", url=server.url)],
            transport=transport,
        )
    assert [problem.kind for problem in caught.value.problems] == ["transport"]
    assert asked(server) == []


@pytest.mark.parametrize(
    ("argument", "value"),
    [("offload_group_size", 4), ("tokenizer_worker_num", 2), ("json_model_override_args", '{"x": 1}')],
)
def test_a_server_started_so_that_others_than_the_sent_weights_answer_is_refused_before_any_write(
    server: Any, answer: Any, tensors: dict[str, torch.Tensor], argument: str, value: object
) -> None:
    told = server.answers["/server_info"].body
    server.answers["/server_info"] = answer({**told, argument: value})
    with pytest.raises(PlanError) as caught:
        connect(server, tensors)
    assert [problem.subject for problem in caught.value.problems] == [argument]
    assert asked(server) == []


def test_an_address_at_which_several_servers_answer_in_turn_is_refused_before_any_write(
    server: Any, answer: Any, tensors: dict[str, torch.Tensor]
) -> None:
    told = server.answers["/server_info"].body
    asked_already: list[bytes] = []

    def one_of_two(body: bytes) -> dict[str, Any]:
        asked_already.append(body)
        return {**told, "startup_time": {"load_weight": 0.5 + len(asked_already) % 2}}

    server.answers["/server_info"] = answer(one_of_two)
    with pytest.raises(EngineError, match=r"Not one server answers.*load balancer"):
        connect(server, tensors)
    assert asked(server) == []


def test_a_first_sync_that_fails_once_the_server_is_paused_says_that_it_stays_so(
    server: Any, answer: Any, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was written, and the server answers nobody: a trainer before may have left it half-written."""
    lane = wl.connect(
        trainer=wl.trainer("torch", model=tensors),
        rollout=[wl.rollout("sglang", url=server.url)],
        release=("kv_cache",),
    )
    with lane:
        server.answers.fail(FLUSH, 1, answer(b"Timed out waiting for idle state.", status=400))
        with pytest.raises(
            EngineError, match=rf"touched no receiver. Generation stays held back at {server.url}"
        ):
            lane.sync(version=1)
        assert CONTINUE_ROUTE not in asked(server)
        assert caplog.text == ""
    assert f"leaves {server.url} with generation held back" in caplog.text


def test_a_lane_that_is_closed_over_a_staged_version_says_that_the_server_stays_paused(
    server: Any, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server, tensors) as lane:
        lane.sync(version=1)
    assert caplog.text == ""
    with connect(server, tensors) as lane:
        lane.stage(version=2)
    assert f"leaves {server.url} with generation held back" in caplog.text
