"""The eras' probes, both answers of each, on facts alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from weightlane.facts import no_facts
from weightlane.probes import NotViable, Viable
from weightlane_sglang.probes import probe_updates_in_session, probe_updates_without_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.facts import EngineFacts


def test_a_server_of_this_era_is_taken_with_its_evidence(facts_of: Callable[..., EngineFacts]) -> None:
    verdict = probe_updates_without_session(facts_of())
    assert isinstance(verdict, Viable)
    assert any("serialized_named_tensors" in line for line in verdict.evidence)


@pytest.mark.requirement("R87")
def test_a_server_with_update_sessions_is_refused_by_the_route_s_name(
    facts_of: Callable[..., EngineFacts],
) -> None:
    routes = (*facts_of().routes, "/begin_weight_update", "/end_weight_update")
    verdict = probe_updates_without_session(facts_of(routes=routes))
    assert isinstance(verdict, NotViable)
    assert "/begin_weight_update" in verdict.reason
    assert "0.5.21" in verdict.reason


def test_the_selector_field_alone_also_tells_of_update_sessions(facts_of: Callable[..., EngineFacts]) -> None:
    fields = dict(facts_of().request_fields)
    fields["UpdateWeightsFromTensorReqInput"] += ("selector",)
    verdict = probe_updates_without_session(facts_of(request_fields=fields))
    assert isinstance(verdict, NotViable)
    assert "selector" in verdict.reason


@pytest.mark.requirement("R32")
@pytest.mark.parametrize(
    ("request_name", "field"),
    [
        ("UpdateWeightsFromTensorReqInput", "serialized_named_tensors"),
        ("UpdateWeightsFromTensorReqInput", "flush_cache"),
        ("PauseGenerationReqInput", "mode"),
        ("UpdateWeightVersionReqInput", "abort_all_requests"),
        ("/flush_cache", "timeout"),
    ],
)
def test_a_missing_field_is_named_beside_those_found(
    facts_of: Callable[..., EngineFacts], request_name: str, field: str
) -> None:
    fields = dict(facts_of().request_fields)
    fields[request_name] = (*tuple(name for name in fields[request_name] if name != field), "other")
    verdict = probe_updates_without_session(facts_of(request_fields=fields))
    assert isinstance(verdict, NotViable)
    assert request_name in verdict.reason
    assert field in verdict.reason
    assert "other" in verdict.reason


def test_a_missing_route_is_named(facts_of: Callable[..., EngineFacts]) -> None:
    routes = tuple(route for route in facts_of().routes if route != "/pause_generation")
    verdict = probe_updates_without_session(facts_of(routes=routes))
    assert isinstance(verdict, NotViable)
    assert "/pause_generation" in verdict.reason


def test_no_facts_are_no_evidence() -> None:
    assert isinstance(probe_updates_without_session(no_facts("sglang")), NotViable)


@pytest.mark.requirement("R87")
def test_a_server_with_update_sessions_has_an_era_of_its_own(session_facts: EngineFacts) -> None:
    verdict = probe_updates_in_session(session_facts)
    assert isinstance(verdict, Viable)
    assert any("updates need a session" in line for line in verdict.evidence)
    assert isinstance(probe_updates_without_session(session_facts), NotViable)


def test_a_server_without_update_sessions_is_not_of_their_era(facts_of: Callable[..., EngineFacts]) -> None:
    verdict = probe_updates_in_session(facts_of())
    assert isinstance(verdict, NotViable)
    assert "/begin_weight_update" in verdict.reason


def test_a_session_that_cannot_be_ended_or_names_no_model_is_refused(session_facts: EngineFacts) -> None:
    routes = tuple(route for route in session_facts.routes if route != "/end_weight_update")
    verdict = probe_updates_in_session(msgspec.structs.replace(session_facts, routes=routes))
    assert isinstance(verdict, NotViable)
    assert "/end_weight_update" in verdict.reason
    fields = {**session_facts.request_fields, "BeginWeightUpdateReqInput": ()}
    verdict = probe_updates_in_session(msgspec.structs.replace(session_facts, request_fields=fields))
    assert isinstance(verdict, NotViable)
    assert "selector" in verdict.reason
