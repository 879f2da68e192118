"""R86: what was decided on each candidate is in the log, once, whatever is asked how often."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

import weightlane.notices
from weightlane.facts import EngineFacts
from weightlane.selection import choose, select

if TYPE_CHECKING:
    from conftest import FakeSite

NOT_VIABLE = "lambda facts: NotViable('Layer does not define load_weights')"
VIABLE = "lambda facts: Viable(('Layer defines load_weights',))"
FACTS = EngineFacts(engine="acme", version="1.5", source="worker")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="weightlane.selection")
    return caplog


@pytest.mark.requirement("R86")
def test_one_record_holds_engine_version_plugin_and_every_decision(
    site: FakeSite, log: pytest.LogCaptureFixture
) -> None:
    site.plugin("one-lane", site.source(probe=NOT_VIABLE), version="1.1")
    site.plugin("two-lane", site.source(probe=VIABLE), version="2.2")
    registry = site.load()
    for _ in range(3):  # as for three replicas
        select(registry, "rollout", "acme", FACTS)
    (record,) = log.records
    assert (record.name, record.levelname) == ("weightlane.selection", "INFO")
    for words in (
        "rollout acme 1.5 (facts from worker)",
        "chosen acme (only) of two-lane 2.2, since acme 1.5 (as the live worker says) fits acme <2,>=1",
        "Layer defines load_weights",
        "not chosen acme (only) of one-lane 1.1: its probe says: Layer does not define load_weights",
    ):
        assert words in record.getMessage()


@pytest.mark.requirement("R86")
def test_another_engine_version_or_decision_is_logged_anew(
    site: FakeSite, log: pytest.LogCaptureFixture
) -> None:
    site.plugin("two-lane", site.source(probe=VIABLE))
    registry = site.load()
    for version in ("1.5", "1.6", "1.5"):
        select(registry, "rollout", "acme", EngineFacts(engine="acme", version=version, source="worker"))
    site.environ["WEIGHTLANE_PIN_ACME"] = "two-lane"
    select(site.load(), "rollout", "acme", FACTS)
    assert [record.getMessage().split(" (")[0] for record in log.records] == [
        "rollout acme 1.5",
        "rollout acme 1.6",
        "rollout acme 1.5",
    ]
    assert "pinned to two-lane by environment variable WEIGHTLANE_PIN_ACME" in log.records[-1].getMessage()


def test_a_listing_decides_nothing_and_logs_nothing(site: FakeSite, log: pytest.LogCaptureFixture) -> None:
    site.plugin("two-lane", site.source(probe=VIABLE))
    choose(site.load(), "rollout", "acme", FACTS)
    assert log.records == []


def test_without_the_memory_each_replica_would_be_logged(
    site: FakeSite, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("two-lane", site.source(probe=VIABLE))
    registry = site.load()
    for _ in range(3):
        monkeypatch.setattr(weightlane.notices, "_logged", set())
        select(registry, "rollout", "acme", FACTS)
    assert len(log.records) == 3
