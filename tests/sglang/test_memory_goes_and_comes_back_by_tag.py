"""A lane that has SGLang release memory: which tags, in which order, and what is never asked of a server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

import weightlane as wl
from weightlane.contexts import BuildRequestsContext
from weightlane.errors import EngineError, NotServableError, PlanError
from weightlane.program import EngineCall
from weightlane.types import Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.contract import (
    CONTINUE_ROUTE,
    GENERATE_ROUTE,
    PAUSE_ROUTE,
    RELEASE_ROUTE,
    RESUME_ROUTE,
    UPDATE_ROUTE,
    VERSION_ROUTE,
)
from weightlane_sglang.memory_plan import plan_memory
from weightlane_sglang.server_memory import ServerMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from weightlane.facts import EngineFacts
    from weightlane.lane import Lane
    from weightlane.program import Lifecycle
    from weightlane.types import MemoryTag, RequestPolicy

FLUSH = "/flush_cache?timeout=30"
SAVER = {"enable_memory_saver": "true"}


@pytest.fixture
def sleeper(lane_server: Any, answer: Any) -> Any:
    for route in (RELEASE_ROUTE, RESUME_ROUTE):
        lane_server.answers[route] = answer(b"null")
    return lane_server


def connect(server: Any, tensors: dict[str, torch.Tensor], release: Collection[MemoryTag]) -> Lane:
    lane = wl.connect(
        trainer=wl.trainer("torch", model=tensors),
        rollout=[wl.rollout("sglang", url=server.url)],
        release=release,
    )
    server.requests.clear()
    return lane


def asked(server: Any) -> list[str]:
    """The routes in order, with the tags where there are any."""
    return [
        f"{route} {body.decode()}" if route in (RELEASE_ROUTE, RESUME_ROUTE) else route
        for method, route, body in server.requests
        if method == "POST"
    ]


def tagged(route: str, tag: str) -> str:
    return f'{route} {{"tags":["{tag}"]}}'


@pytest.mark.requirement("R77", part="full weights")
@pytest.mark.requirement("R79")
def test_a_sync_releases_the_cache_once_idle_and_takes_back_that_alone(
    sleeper: Any, lane_tensors: dict[str, torch.Tensor]
) -> None:
    with connect(sleeper, lane_tensors, ["weights", "kv_cache"]) as lane:
        for version in (1, 2):
            sleeper.requests.clear()
            lane.sync(version=version)
            assert asked(sleeper) == [
                *(PAUSE_ROUTE, FLUSH, tagged(RELEASE_ROUTE, "kv_cache")),
                *(UPDATE_ROUTE, FLUSH, tagged(RESUME_ROUTE, "kv_cache")),
                *(VERSION_ROUTE, CONTINUE_ROUTE),
            ], "from the first sync on"


@pytest.mark.requirement("R78")
@pytest.mark.requirement("R80", part="SGLang")
@pytest.mark.parametrize("release", [("kv_cache",), ("weights", "kv_cache"), ("weights",)])
def test_what_sleep_releases_the_next_sync_resumes_weights_first(
    sleeper: Any, lane_tensors: dict[str, torch.Tensor], release: tuple[MemoryTag, ...]
) -> None:
    with connect(sleeper, lane_tensors, release) as lane:
        lane.sync(version=1)
        sleeper.requests.clear()
        lane.sleep()
        assert asked(sleeper) == [PAUSE_ROUTE, FLUSH, *(tagged(RELEASE_ROUTE, tag) for tag in release)]
        sleeper.requests.clear()
        lane.sync(version=2)
        weights = [tagged(RESUME_ROUTE, "weights")] if "weights" in release else []
        cache = [tagged(RESUME_ROUTE, "kv_cache")] if "kv_cache" in release else []
        assert asked(sleeper) == [*weights, UPDATE_ROUTE, FLUSH, *cache, VERSION_ROUTE, CONTINUE_ROUTE]


@pytest.mark.requirement("R78")
@pytest.mark.parametrize(("saver", "goes_on"), [(True, False), (False, True)])
def test_wake_takes_back_what_sleep_released_and_lost_weights_are_not_served(
    sleeper: Any, answer: Any, lane_tensors: dict[str, torch.Tensor], saver: bool, goes_on: bool
) -> None:
    told = sleeper.answers["/server_info"].body
    sleeper.answers["/server_info"] = answer({**told, "enable_memory_saver": saver})
    with connect(sleeper, lane_tensors, ["weights", "kv_cache"]) as lane:
        lane.sync(version=1)
        lane.sleep()
        sleeper.requests.clear()
        lane.wake()
        back = [tagged(RESUME_ROUTE, "weights"), tagged(RESUME_ROUTE, "kv_cache")]
        assert asked(sleeper) == [*back, *([CONTINUE_ROUTE] if goes_on else [])]
        lane.wake()
        assert asked(sleeper).count(back[0]) == 1, "a second wake resumes nothing"


@pytest.mark.parametrize("saver", [True, False])
def test_a_request_to_a_server_that_its_lane_put_to_sleep_is_refused_and_does_not_wait(
    sleeper: Any, answer: Any, lane_tensors: dict[str, torch.Tensor], saver: bool
) -> None:
    told = sleeper.answers["/server_info"].body
    sleeper.answers["/server_info"] = answer({**told, "enable_memory_saver": saver})

    def ask(lane: Lane) -> list[str]:
        sleeper.requests.clear()
        try:
            lane.replicas[0].generate([[1]], max_tokens=1)
        except NotServableError:
            raise
        except EngineError:  # the fake has no answer to it
            pass
        return [route for route in asked(sleeper) if route == GENERATE_ROUTE]

    with connect(sleeper, lane_tensors, ["weights", "kv_cache"]) as lane:
        lane.sync(version=1)
        assert ask(lane) == [GENERATE_ROUTE], "a sync releases the cache on its way, and takes it back"
        lane.sleep()
        with pytest.raises(NotServableError, match="release memory"):
            ask(lane)
        lane.wake()
        if saver:
            with pytest.raises(NotServableError, match="holds weights"):
                ask(lane)
            lane.sync(version=2)
        assert ask(lane) == [GENERATE_ROUTE]


def test_a_server_started_anew_while_it_slept_is_not_asked_to_resume(
    sleeper: Any, answer: Any, lane_tensors: dict[str, torch.Tensor]
) -> None:
    with connect(sleeper, lane_tensors, ["kv_cache"]) as lane:
        lane.sync(version=1)
        lane.sleep()
        told = sleeper.answers["/server_info"].body
        sleeper.answers["/server_info"] = answer({**told, "startup_time": {"load_weight": 0.5}})
        sleeper.requests.clear()
        with pytest.raises(EngineError, match=r"kv_cache cannot be resumed.*started anew"):
            lane.wake()
        assert not any(RESUME_ROUTE in route for route in asked(sleeper))
        sleeper.requests.clear()
        lane.sync(version=2)
        assert asked(sleeper)[:3] == [PAUSE_ROUTE, FLUSH, tagged(RELEASE_ROUTE, "kv_cache")], "planned anew"


def call(route: str, tag: str) -> EngineCall:
    return EngineCall(route, f'{{"tags":["{tag}"]}}')


def memory(*told: frozenset[str] | None) -> ServerMemory:
    answers = iter(told)
    return ServerMemory("http://server", lambda: "same", lambda: next(answers))


@pytest.mark.parametrize(
    ("before", "route", "told", "match"),
    [
        ((), RESUME_ROUTE, (None,), "this lane has not released it"),
        ((RELEASE_ROUTE,), RELEASE_ROUTE, (None, None), "released already"),
        ((), RELEASE_ROUTE, (frozenset({"weights"}),), "released already"),
        ((RELEASE_ROUTE,), RESUME_ROUTE, (frozenset(), frozenset()), "its scheduler has not released it"),
    ],
    ids=["never released", "released twice", "by another controller", "resumed by another controller"],
)
def test_a_request_that_would_do_harm_is_not_sent(
    before: tuple[str, ...], route: str, told: tuple[frozenset[str] | None, ...], match: str
) -> None:
    held = memory(*told)
    for earlier in before:
        with held.checked(call(earlier, "weights")):
            pass
    with pytest.raises(EngineError, match=match), held.checked(call(route, "weights")):
        pytest.fail("it was let through")


def test_a_release_whose_answer_was_lost_can_be_resumed() -> None:
    held = memory(None, None)
    with pytest.raises(TimeoutError), held.checked(call(RELEASE_ROUTE, "weights")):
        raise TimeoutError
    with held.checked(call(RESUME_ROUTE, "weights")):
        pass


def lifecycle(
    facts: EngineFacts, *, release: tuple[MemoryTag, ...] = (), requests: RequestPolicy | None = None
) -> Lifecycle:
    context = BuildRequestsContext(
        plugin.weightlane_register_backends()[0], facts, Phase.FULL, TransportName.INLINE, (), (), (),
        "counts", release=release, requests=requests,
    )  # fmt: skip
    return plugin.weightlane_plan_lifecycle(context)


@pytest.mark.parametrize(
    ("arguments", "contents", "note"),
    [
        ({}, "kept", "frees no memory.*enable_memory_saver nothing"),
        ({"enable_memory_saver": "false"}, "kept", "frees no memory.*enable_memory_saver false"),
        (SAVER, "lost", "its weights are lost"),
        ({**SAVER, "enable_weights_cpu_backup": "true"}, "kept", "copy of its weights is on the host"),
    ],
)
def test_what_a_release_frees_and_keeps_is_read_from_how_the_server_was_started(
    facts_of: Callable[..., EngineFacts], arguments: dict[str, str], contents: str, note: str
) -> None:
    planned = lifecycle(facts_of(launch_arguments=arguments), release=("weights", "kv_cache"))
    assert [(item.tag, item.contents) for item in planned.memory] == [
        ("weights", contents),
        ("kv_cache", "lost"),
    ]
    assert re.search(note, "\n".join(planned.notes))


def test_weights_with_adapters_among_them_are_not_let_go_without_a_copy(
    facts_of: Callable[..., EngineFacts],
) -> None:
    lora = {**SAVER, "enable_lora": "true"}
    with pytest.raises(PlanError, match="slots of its adapters"):
        plan_memory(facts_of(launch_arguments=lora), ("weights", "kv_cache"))
    assert len(plan_memory(facts_of(launch_arguments=lora), ("kv_cache",))) == 1
    backed_up = {**lora, "enable_weights_cpu_backup": "true"}
    assert len(plan_memory(facts_of(launch_arguments=backed_up), ("weights", "kv_cache"))) == 2


@pytest.mark.parametrize("missing", ["route", "field"])
def test_a_server_that_cannot_release_by_tag_is_refused_by_name(
    facts_of: Callable[..., EngineFacts], missing: str
) -> None:
    known = facts_of()
    routes = tuple(route for route in known.routes if route != RESUME_ROUTE or missing != "route")
    fields = dict(known.request_fields)
    if missing == "field":
        fields["ResumeMemoryOccupationReqInput"] = ("rid",)
    with pytest.raises(PlanError, match=r"/resume_memory_occupation|ResumeMemoryOccupationReqInput\.tags"):
        plan_memory(facts_of(routes=routes, request_fields=fields), ("kv_cache",))


@pytest.mark.parametrize(
    ("requests", "session", "mode"),
    [(None, False, "abort"), ("abort", False, "abort"), ("abort", True, "abort"), ("keep", True, "retract")],
)
def test_the_pause_does_with_running_requests_what_was_asked_for(
    facts_of: Callable[..., EngineFacts],
    session_facts: EngineFacts,
    requests: RequestPolicy | None,
    session: bool,
    mode: str,
) -> None:
    planned = lifecycle(session_facts if session else facts_of(), requests=requests)
    assert planned.pause[0].body == f'{{"mode":"{mode}"}}'
    assert planned.requests == (requests or "abort")


@pytest.mark.parametrize(
    ("requests", "session", "match"),
    [
        ("drain", False, "no pause that waits"),
        ("drain", True, "no pause that waits"),
        ("keep", False, "flushes no cache while requests wait"),
    ],
)
def test_a_policy_that_no_pause_of_this_server_means_is_refused(
    facts_of: Callable[..., EngineFacts],
    session_facts: EngineFacts,
    requests: RequestPolicy,
    session: bool,
    match: str,
) -> None:
    with pytest.raises(PlanError, match=match):
        lifecycle(session_facts if session else facts_of(), requests=requests)
