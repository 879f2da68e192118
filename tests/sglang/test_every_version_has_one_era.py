"""The requests that real SGLang versions list, from their own classes: each is of one era, and sent no more.

`record_request_fields.py` made the records from the published wheels.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import weightlane as wl
from weightlane.contexts import BuildRequestsContext
from weightlane.errors import EngineDeadError, EngineError, PlanError
from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, Viable
from weightlane.program import with_lifecycle
from weightlane.types import Phase, TransportName
from weightlane_sglang import plugin
from weightlane_sglang.contract import (
    ANNOUNCED_FIELDS,
    BEGIN_UPDATE_ROUTE,
    DESTROY_GROUP_ROUTE,
    DISTRIBUTED_REQUEST,
    GROUP_FIELDS,
    INIT_GROUP_REQUEST,
    PAUSE_REQUEST,
    PAUSE_ROUTE,
    RELEASE_REQUEST,
    RELEASE_ROUTE,
    RESUME_REQUEST,
    RESUME_ROUTE,
    UPDATE_REQUEST,
    VERSION_REQUEST,
    VERSION_ROUTE,
)
from weightlane_sglang.untimed_flush import until_idle

if TYPE_CHECKING:
    import torch

RECORDS = Path(__file__).parent / "data" / "request_fields"
ERAS = {
    "untimed-flush": ("0.5.1", "0.5.4", "0.5.8"),
    "updates-without-session": ("0.5.10", "0.5.12", "0.5.16", "0.5.17", "0.5.18"),
    "updates-in-session": ("0.5.21", "0.5.23"),
}
VERSIONS = [(version, era) for era, versions in ERAS.items() for version in versions]
REQUESTS = {
    PAUSE_ROUTE: PAUSE_REQUEST,
    VERSION_ROUTE: VERSION_REQUEST,
    RELEASE_ROUTE: RELEASE_REQUEST,
    RESUME_ROUTE: RESUME_REQUEST,
}


def recorded(version: str) -> EngineFacts:
    found: dict[str, Any] = json.loads((RECORDS / f"{version}.json").read_text())
    fields = {name: tuple(listed) for name, listed in found["request_fields"].items()}
    return EngineFacts("sglang", version, "installed", request_fields=fields, routes=tuple(found["routes"]))


@pytest.mark.requirement("R32")
@pytest.mark.requirement("R87")
@pytest.mark.parametrize(("version", "era"), VERSIONS)
def test_probe_and_range_agree_on_the_one_era_of_a_version(version: str, era: str) -> None:
    facts = recorded(version)
    verdicts = {item.era: item.probe(facts) for item in plugin.weightlane_register_backends()}
    assert [each for each, verdict in verdicts.items() if isinstance(verdict, Viable)] == [era]
    assert all(verdict.reason for verdict in verdicts.values() if isinstance(verdict, NotViable))
    ranges = {item.era: item.versions for item in plugin.weightlane_register_backends()}
    assert [each for each, known in ranges.items() if known.contains(version, prereleases=True)] == [era]


@pytest.mark.requirement("R30", part="full weights")
@pytest.mark.parametrize(("version", "era"), VERSIONS)
def test_every_field_that_is_sent_is_listed_by_that_version(version: str, era: str) -> None:
    facts = recorded(version)
    descriptor = next(item for item in plugin.weightlane_register_backends() if item.era == era)
    context = BuildRequestsContext(
        descriptor, facts, Phase.FULL, TransportName.INLINE, (), (), (), "counts",
        release=("weights", "kv_cache"),
    )  # fmt: skip
    made = with_lifecycle(
        plugin.weightlane_build_requests(context), plugin.weightlane_plan_lifecycle(context)
    )
    memory = [call for item in made.memory for call in (item.release, item.resume)]
    for call in (*made.pause, *made.settle, *made.publish, *made.resume, *memory):
        route, _, query = call.route.partition("?")
        assert route in facts.routes
        sent = set(json.loads(call.body)) | ({call.version_field} - {""})
        assert sent <= set(facts.request_fields.get(REQUESTS.get(route, ""), ()))
        if query:
            assert query.split("=")[0] in facts.request_fields[route]
    sent = set(json.loads(made.move.body)) | {made.move.payload_field}
    assert sent <= set(facts.request_fields[UPDATE_REQUEST])
    assert ("selector" in sent) == (BEGIN_UPDATE_ROUTE in facts.routes)
    assert json.loads(made.pause[0].body) == (
        {"mode": "abort"} if PAUSE_REQUEST in facts.request_fields else {}
    )


@pytest.mark.parametrize(("version", "era"), VERSIONS)
def test_every_field_of_an_announced_bucket_is_listed_by_that_version_or_the_plan_refuses(
    version: str, era: str
) -> None:
    facts = msgspec.structs.replace(recorded(version), device="cpu")
    descriptor = next(item for item in plugin.weightlane_register_backends() if item.era == era)
    context = BuildRequestsContext(
        descriptor, facts, Phase.FULL, TransportName.COLLECTIVE, (), (), (), "counts"
    )
    if DESTROY_GROUP_ROUTE not in facts.routes:
        with pytest.raises(PlanError, match=f"{version} has no route {DESTROY_GROUP_ROUTE}"):
            plugin.weightlane_build_requests(context)
        return
    made = plugin.weightlane_build_requests(context)
    sent = set(json.loads(made.move.body)) | set(ANNOUNCED_FIELDS)
    assert sent <= set(facts.request_fields[DISTRIBUTED_REQUEST])
    assert ("selector" in sent) == (BEGIN_UPDATE_ROUTE in facts.routes)
    assert set(GROUP_FIELDS) <= set(facts.request_fields[INIT_GROUP_REQUEST])


def test_a_flush_that_answers_at_once_is_asked_for_until_the_server_is_idle(
    lane_server: Any, answer: Any, lane_tensors: dict[str, torch.Tensor]
) -> None:
    found = recorded("0.5.4")
    schemas = {
        name: {"properties": {field: {} for field in fields}}
        for name, fields in found.request_fields.items()
        if not name.startswith("/")
    }
    paths: dict[str, Any] = {route: {"post": {}} for route in found.routes}
    answers = lane_server.answers
    answers["/openapi.json"] = answer({"paths": paths, "components": {"schemas": schemas}})
    told = {**answers["/server_info"].body, "version": "0.5.4"}
    del told["startup_time"]
    answers["/get_server_info"], answers["/get_model_info"] = answer(told), answers["/model_info"]
    del answers["/server_info"], answers["/model_info"]
    refused: list[str] = []
    flush = answer(lambda _: b"Cache flushed.")
    busy = answer(lambda _: refused.append("busy") or b"not now", status=400)
    original = answers.get
    answers.get = lambda route, default=None: (
        (flush if len(refused) >= 3 else busy) if route == "/flush_cache" else original(route, default)
    )
    with wl.connect(
        trainer=wl.trainer("torch", model=lane_tensors),
        rollout=[wl.rollout("sglang", url=lane_server.url)],
    ) as lane:
        assert "a new start shows in its random seed alone" in str(lane.plan())
        lane.sync(version=1)
    assert len(refused) == 3
    assert lane_server.bodies(PAUSE_ROUTE) == [{}], "a pause of that version takes no mode"


def test_only_a_refusal_is_asked_again_and_not_for_ever() -> None:
    attempts: list[float] = []

    def refuse(seconds: float) -> None:
        attempts.append(seconds)
        raise EngineError("status 400")

    started = time.monotonic()
    with pytest.raises(EngineError, match="status 400"):
        until_idle(refuse, 0.5)
    assert time.monotonic() - started < 1
    assert len(attempts) > 1

    def die(seconds: float) -> None:
        attempts.append(seconds)
        raise EngineDeadError("gone")

    attempts.clear()
    with pytest.raises(EngineDeadError):
        until_idle(die, 0.5)
    assert len(attempts) == 1
