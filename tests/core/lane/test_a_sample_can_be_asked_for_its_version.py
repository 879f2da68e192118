"""`lane.version_of`: which version made a sample, how far it is behind, and what nobody can know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_engines import PROMPT, engines, lane_to, weights_of

from weightlane.errors import StaleSampleError
from weightlane.reference.plugin import weightlane_register_backends
from weightlane.sample_version import PublishedVersions, SampleVersion
from weightlane.types import Capability

if TYPE_CHECKING:
    from pathlib import Path


def test_samples_of_a_live_lane_tell_how_many_versions_came_since(model_folder: Path) -> None:
    with lane_to(weights_of(model_folder), engines(model_folder, 1)) as lane:
        (endpoint,) = lane.replicas
        unsynced = endpoint.generate(PROMPT, max_tokens=1)[0]
        assert lane.version_of(unsynced) == SampleVersion("unsynced", None, None, None)
        lane.sync(version=10)
        old = endpoint.generate(PROMPT, max_tokens=1)[0]
        assert lane.version_of(old) == SampleVersion("published", 10, 0, 10)
        lane.sync(version=20)
        lane.sync(version=30)
        assert lane.version_of(old) == SampleVersion("published", 10, 2, 30)
        assert lane.version_of(20).behind == 1
        assert lane.version_of(unsynced).origin == "unsynced"
        assert lane.version_of(7) == SampleVersion("foreign", 7, None, 30)
        lane.stage(version=40)
        assert lane.version_of(old).behind == 2, "a staged version serves nowhere"


def test_staleness_can_be_required_and_what_is_not_known_is_not_fresh() -> None:
    versions = PublishedVersions()
    for version in (1, 2, 3):
        versions.add(version)
    fresh = versions.of(2, all_stamp=True)
    assert fresh.require(at_most_behind=1) is fresh
    with pytest.raises(StaleSampleError, match="2 versions behind"):
        versions.of(1, all_stamp=True).require(at_most_behind=1)
    for sample in (None, 9):
        with pytest.raises(StaleSampleError, match="of an age nobody knows"):
            versions.of(sample, all_stamp=True).require(at_most_behind=99)


def test_without_a_stamp_nothing_is_guessed_where_some_engine_cannot_stamp() -> None:
    versions = PublishedVersions()
    versions.add(4)
    assert versions.of(None, all_stamp=False) == SampleVersion("unknown", None, None, 4)
    assert versions.of(None, all_stamp=True).origin == "unsynced"


def test_a_version_that_is_published_again_is_the_newest() -> None:
    versions = PublishedVersions()
    for version in (1, 2, 1):
        versions.add(version)
    assert versions.of(1, all_stamp=True).behind == 0
    assert versions.of(2, all_stamp=True).behind == 1


def test_the_plan_says_which_replicas_stamp(model_folder: Path) -> None:
    (descriptor,) = weightlane_register_backends()
    assert Capability.WEIGHT_VERSION in descriptor.capabilities
    with lane_to(weights_of(model_folder), engines(model_folder, 1)) as lane:
        assert lane.plan().replicas[0].stamps_version
        assert "samples carry no weight version" not in str(lane.plan())
