"""The era by probe, the options by name, and what a model without any ranks describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from weightlane.contexts import ExportContext, TrainerLifecycleContext
from weightlane.errors import ExportError
from weightlane.facts import EngineFacts
from weightlane.manifest import Manifest
from weightlane.probes import NotViable, Viable
from weightlane.types import Phase
from weightlane_fsdp import plugin
from weightlane_fsdp.eras import ERAS, probe_composable, probe_public
from weightlane_fsdp.facts import COMPOSABLE_FSDP2, FLAT_RECORD, PUBLIC_FSDP2, SHARD_RECORD, installed_facts
from weightlane_fsdp.options import NAMES, read_options

if TYPE_CHECKING:
    from pathlib import Path


def facts(**attributes: bool) -> EngineFacts:
    names = {
        "public": PUBLIC_FSDP2,
        "shard": SHARD_RECORD,
        "flat": FLAT_RECORD,
        "composable": COMPOSABLE_FSDP2,
    }
    asked = {names[name]: answer for name, answer in attributes.items()}
    return EngineFacts("fsdp", "2.9.0", "installed", attributes=asked)


def test_the_installed_torch_is_of_the_public_era() -> None:
    found = installed_facts()
    assert found is not None
    assert found.version == torch.__version__
    assert isinstance(probe_public(found), Viable)
    assert isinstance(probe_composable(found), NotViable)


def test_a_torch_of_each_era_is_told_by_its_source() -> None:
    newer = facts(public=True, shard=True, flat=True, composable=False)
    older = facts(public=False, shard=False, flat=True, composable=True)
    neither = facts(public=False, shard=False, flat=True, composable=False)
    assert [isinstance(probe_public(item), Viable) for item in (newer, older, neither)] == [
        True,
        False,
        False,
    ]
    assert [isinstance(probe_composable(item), Viable) for item in (newer, older, neither)] == [
        *(False, True, False)
    ]
    assert isinstance(probe_public(facts()), NotViable), "nobody looked"


def test_an_older_torch_is_read_where_it_lies(tmp_path: Path) -> None:
    """As 2.5 has it: the class under `_composable`, and a flat parameter."""
    root = tmp_path / "torch/distributed"
    for folder in ("_composable/fsdp", "fsdp"):
        (root / folder).mkdir(parents=True)
    (root / "_composable/fsdp/_fsdp_param.py").write_text("class FSDPParam:\n    sharded_param: int\n")
    (root / "fsdp/_flat_param.py").write_text("class FlatParameter:\n    _numels_with_padding: tuple\n")
    metadata = tmp_path / "torch-2.5.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    found = installed_facts((str(tmp_path),))
    assert found is not None
    assert found.version == "2.5.1"
    assert isinstance(probe_composable(found), Viable)
    assert isinstance(probe_public(found), NotViable)


def test_eras_share_their_options() -> None:
    assert {era.options for era in ERAS} == {NAMES}
    assert {era.name for era in ERAS} == {"fsdp"}


def test_a_choice_that_does_not_exist_is_named() -> None:
    with pytest.raises(ExportError, match="buffers='rank_0' is unknown") as caught:
        read_options({"buffers": "rank_0"})
    assert "Use 'rank0'" in str(caught.value)


@pytest.mark.parametrize(("staging", "loads"), [("parts", False), ("shard", True)])
def test_only_staging_of_a_shard_loads_and_offloads(staging: str, loads: bool) -> None:
    manifest = Manifest(Phase.FULL, 1, ())
    found = plugin.weightlane_plan_lifecycle(TrainerLifecycleContext(ERAS[0], manifest, {"staging": staging}))
    assert (bool(found.onload), bool(found.offload)) == (loads, loads)


def test_one_rank_describes_a_plain_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    manifest = plugin.weightlane_describe_export(ExportContext(ERAS[0], model, Phase.FULL, 0, 1, {}))
    assert [spec.name for spec in manifest.tensors] == list(model.state_dict())
    assert not manifest.collective
    assert manifest.groups == ()
    assert manifest.group_backend == "gloo"


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"weight": torch.zeros(2)}, "type dict cannot be exported"),
        (nn.Sequential(WithExtraState(2, 2)), "0 keeps extra state"),
        (nn.Linear(2, 2, device="meta"), "weight is a tensor on the meta device"),
    ],
)
def test_what_cannot_be_exported_is_named(model: object, told: str) -> None:
    with pytest.raises(ExportError, match=told):
        plugin.weightlane_describe_export(ExportContext(ERAS[0], model, Phase.FULL, 0, 1, {}))
