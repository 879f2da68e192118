"""Every release's own objects give the same frozen form as its dicts, and the ranks and scales of its layers.

`data/peft` holds what peft 0.12 to 0.21 said and did (`peft_releases.py` wrote it down). The release that is
installed is asked itself; `nox -s peft_versions` does that with each of the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from peft_releases import LAYERED, MODULES, build, layers_of, recorded, told_by_dict

from weightlane.errors import PlanError
from weightlane.manifest import TensorSpec
from weightlane.peft import LoraDeclaration, adapter_config_of, declared_lora, lora_name, peft_json
from weightlane.peft.patterns import RULES, looked_up, rules_of

RECORDS = {
    path.stem: json.loads(path.read_text())
    for path in sorted(Path(__file__).with_name("data").joinpath("peft").glob("*.json"))
}
CASES = [(release, case) for release, record in RECORDS.items() for case in record["objects"]]
every_case = pytest.mark.parametrize(("release", "case"), CASES)


def as_object(fields: dict[str, Any]) -> Any:
    """An object with a peft configuration's attributes, that nobody can turn into a dict."""
    return SimpleNamespace(**fields)


def tensors_of(ranks: dict[str, int]) -> list[TensorSpec]:
    return [
        TensorSpec(lora_name(module, side), (rank, 4) if side == "A" else (4, rank), "float32")
        for module, rank in ranks.items()
        for side in ("A", "B")
    ]


def test_five_releases_are_recorded() -> None:
    assert [record["release"] for record in RECORDS.values()] == [
        "0.12.0",
        "0.15.2",
        "0.17.1",
        "0.19.1",
        "0.21.2",
    ]
    assert {case for _, case in CASES} >= {"all linear", "regex", "block-diagonal", "activated", "parameters"}


@every_case
@pytest.mark.requirement("R19")
@pytest.mark.requirement("R20")
@pytest.mark.requirement("R21")
@pytest.mark.requirement("R22", part="no string is split into letters")
@pytest.mark.requirement("R25")
def test_an_object_and_its_dict_say_the_same_and_survive_json(release: str, case: str) -> None:
    record = RECORDS[release]
    fields = recorded(record, "objects", case)
    declared = declared_lora(as_object(fields))
    assert declared == declared_lora(fields)
    told = recorded(record, "dicts", case)
    if isinstance(told, str):  # what 0.19.1 does with a block-diagonal adapter
        assert (release, case) == ("0.19.1", "block-diagonal")
        assert told.startswith("TypeError")
    else:
        assert declared_lora(told) == declared
    again = msgspec.json.decode(msgspec.json.encode(declared), type=LoraDeclaration)
    assert again == declared
    assert declared_lora(again) is again

    targets = fields["target_modules"]
    if isinstance(targets, str):
        assert declared.target_modules == targets
    else:
        assert declared.target_modules == tuple(sorted(targets))
    excluded = fields.get("exclude_modules")
    if isinstance(excluded, set):
        assert declared.exclude_modules == tuple(sorted(excluded))
    assert declared.task_type in ("", "CAUSAL_LM")
    assert isinstance(told, str) or json.dumps(declared.features)


@pytest.mark.parametrize(("release", "case"), [(r, c) for r, c in CASES if c in LAYERED])
def test_ranks_and_scales_are_those_of_the_layers_that_the_release_makes(release: str, case: str) -> None:
    record = RECORDS[release]
    # Which rule held is told by the release: before 0.19 only the library that the object came from knows.
    fields = {**recorded(record, "objects", case), "peft_version": release}
    layers = {module: tuple(pair) for module, pair in record["layers"][case].items()}
    config = adapter_config_of(
        fields, name="policy", tensors=tensors_of({module: rank for module, (rank, _) in layers.items()})
    )
    assert config.target_modules == tuple(layers)
    assert {
        module: (lora.rank, pytest.approx(lora.scaling, rel=1e-12)) for module, lora in config.modules.items()
    } == layers
    assert config.rank == max(rank for rank, _ in layers.values())


def test_releases_do_read_patterns_otherwise_and_unrecorded_ones_are_refused_where_it_matters() -> None:
    """The control of the test above: with another release's rule, it would fail."""
    older, newer = RECORDS["0.12.0"], RECORDS["0.21.2"]
    assert older["layers"]["both"] != newer["layers"]["both"]
    fields = {**recorded(newer, "objects", "both"), "peft_version": None}
    ranks = {module: rank for module, (rank, _) in newer["layers"]["both"].items()}
    with pytest.raises(PlanError, match=r"layers\.0\.q_proj: releases of peft .* has no peft_version"):
        adapter_config_of(fields, name="policy", tensors=tensors_of(ranks))
    # Where every release means the same, nobody needs to know which it was.
    del ranks["layers.0.q_proj"]
    assert adapter_config_of(fields, name="policy", tensors=tensors_of(ranks)).lora_of("q_proj").rank == 8


@pytest.mark.parametrize(
    ("version", "since"),
    [("0.12.0", "0"), ("0.13.2", "0"), ("0.14.0", "0.14"), ("0.15.0", "0.15"), ("0.19.2.dev0@4f2a", "0.15")],
)
def test_the_rule_follows_the_recorded_release(version: str, since: str) -> None:
    assert [rule.since for rule in rules_of(version)] == [since]
    assert rules_of("") == rules_of("unknown") == RULES


def test_patterns_on_the_wire_mean_one_module_each_under_every_rule_that_engines_follow() -> None:
    config = adapter_config_of(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {r"layers\.1\.q_proj": 2}},
        name="policy",
        tensors=tensors_of({"layers.1.q_proj": 2, "wrapped.layers.1.q_proj": 2, "layers.1x.q_proj": 4}),
    )
    wire = json.loads(peft_json(config))
    assert (wire["r"], wire["lora_alpha"]) == (4, 8.0)
    for module, lora in config.modules.items():
        rank, alpha = looked_up(RULES[-1], wire["rank_pattern"], wire.get("alpha_pattern", {}), module)
        assert ((rank or wire["r"]), (alpha or wire["lora_alpha"])) == (lora.rank, lora.alpha)


# -- the release that is installed ----------------------------------------------------------------------


@pytest.mark.parametrize("case", sorted({case for _, case in CASES}))
@pytest.mark.requirement("R19")
def test_the_installed_release_says_what_was_recorded(case: str) -> None:
    import peft

    config = build(case)
    if config is None:
        assert not any(
            case in record["objects"] for record in RECORDS.values() if record["release"] == peft.__version__
        )
        return
    declared = declared_lora(config)
    assert declared.peft_version == peft.__version__
    told = told_by_dict(config)
    if not isinstance(told, str):
        assert declared == declared_lora({**told, "peft_version": peft.__version__})
    record = RECORDS.get(peft.__version__)
    if record is not None:
        fields = {**recorded(record, "objects", case), "peft_version": peft.__version__}
        assert declared == declared_lora(fields)
    if case in LAYERED:
        layers = layers_of(case)
        real = adapter_config_of(
            config, name="policy", tensors=tensors_of({module: rank for module, (rank, _) in layers.items()})
        )
        for module, (rank, scaling) in layers.items():
            assert real.lora_of(module).rank == rank
            assert real.lora_of(module).scaling == pytest.approx(scaling, rel=1e-12)
        assert set(layers) <= set(MODULES)


def test_a_folder_that_the_installed_release_saved_is_read(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, PeftModel

    from weightlane.peft.adapter_folder import read_adapter_folder

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.v_proj = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)

    wanted = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}
    model = PeftModel(Small(), LoraConfig(r=4, lora_alpha=8, **wanted))
    model.save_pretrained(tmp_path)
    found = read_adapter_folder(tmp_path)
    config = found.adapter("policy")
    assert {module: lora.rank for module, lora in config.modules.items()} == {"q_proj": 4, "v_proj": 2}
    assert found.declaration.target_modules == ("q_proj", "v_proj")
    assert {spec.shape for spec in found.tensors} == {(4, 6), (4, 4), (2, 6), (4, 2)}
