"""One plugin, two eras: every hook is told in its context which of them was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.cli.launching import LaunchWish, plan_engine_launch
from weightlane.contexts import RolloutTarget
from weightlane.planning import PlanRequest, open_replica, open_replicas
from weightlane.types import Mode

if TYPE_CHECKING:
    from conftest import FakeSite

    from weightlane.registry import Registry

ERAS = """
from weightlane.contexts import LaunchPlan
from weightlane.facts import EngineFacts
from weightlane.types import Capability

class FakeEndpoint:
    def __init__(self, era):
        self.era = era

    def describe_workers(self, backend):
        return (backend,)

@hookimpl
def weightlane_register_backends():
    return [BackendDescriptor(
        name="acme", role="rollout", engine="acme", era=era, versions=SpecifierSet(versions),
        distributions=("acme-engine",), probe=always_viable,
        capabilities=frozenset([Capability("receive-full")]),
    ) for era, versions in (("old", ">=1,<2"), ("new", ">=2,<3"))]

@hookimpl
def weightlane_collect_facts(context):
    if context.target is not None:
        return EngineFacts(engine="acme", version=context.target.address.rpartition("/")[2], source="server")

@hookimpl
def weightlane_plan_launch(context):
    return LaunchPlan(("--flags-of", context.descriptor.era))

@hookimpl
def weightlane_open_endpoint(context):
    return FakeEndpoint(context.descriptor.era)
"""

BY_VERSION = pytest.mark.parametrize(("version", "era"), [("1.9", "old"), ("2.0", "new")])


@pytest.fixture
def registry(site: FakeSite) -> Registry:
    site.plugin("acme-lane", site.source(more=ERAS))
    return site.load()


@BY_VERSION
def test_launching_asks_for_the_flags_of_the_era_of_the_installed_version(
    site: FakeSite, registry: Registry, version: str, era: str
) -> None:
    site.engine("acme-engine", version)
    wish = LaunchWish("acme", Mode.FULL, None, 1, "cpu", None, "")
    launch = plan_engine_launch(registry, wish)
    assert (launch.era, launch.command[1:]) == (era, ("--flags-of", era))


def lane_of(*versions: str) -> PlanRequest:
    """A request for one replica of each version."""
    return PlanRequest(
        lane="a",
        mode=Mode.FULL,
        verify="digest",
        bucket_bytes=1,
        transport=None,
        trainer_backend="",
        targets=tuple(RolloutTarget("acme", address=f"http://x.invalid/{version}") for version in versions),
        pins=(None,) * len(versions),
        open_seconds=1.0,
    )


@BY_VERSION
def test_a_replica_is_opened_by_the_era_of_its_live_version(
    registry: Registry, version: str, era: str
) -> None:
    replica = open_replica(registry, lane_of(version), 0)
    assert (replica.selected.descriptor.era, getattr(replica.endpoint, "era", "")) == (era, era)
    assert replica.workers == (f"acme-lane/acme@{era}",)  # by which the engine's own process looks it up


def test_replicas_of_two_eras_are_each_opened_by_their_own(registry: Registry) -> None:
    replicas = open_replicas(registry, lane_of("2.5", "1.5", "2.0"))
    assert [getattr(replica.endpoint, "era", "") for replica in replicas] == ["new", "old", "new"]
