"""What the plugin sends is what each SGLang version reads: its own classes, unpickler and `LoRAConfig`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import wire_requests
from other_versions import EVERY_VERSION
from read_requests import PAYLOADS, held

from weightlane_sglang.adapter_contract import LOAD_REQUEST
from weightlane_sglang.adapter_expression import config_json
from weightlane_sglang.contract import UPDATE_REQUEST

if TYPE_CHECKING:
    from kept_result import MatrixResult

pytestmark = [pytest.mark.live, pytest.mark.matrix, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("read_requests.py")
MISSPELT = "weight_verison"
CONTAINERS = {UPDATE_REQUEST: "list", LOAD_REQUEST: "dict"}


def told_by(python: Path, folder: Path, asked: dict[str, Any], file: Path) -> dict[str, Any]:
    """What the program in that version's environment says of these requests."""
    file.write_text(json.dumps(asked), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(python), "-W", "ignore", str(PROGRAM), str(file)],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def expected_tensors(request: str) -> dict[str, list[Any]]:
    sent = wire_requests.MATRICES if request == LOAD_REQUEST else wire_requests.WEIGHTS
    return {name: ["Tensor", *held(tensor.detach())[1:]] for name, tensor in sent.items()}


@pytest.mark.parametrize("version", EVERY_VERSION)
def test_every_request_arrives_whole_on_every_rank(
    sglang_python: Path,
    sglang_versions: Path,
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    matrix_result: MatrixResult,
) -> None:
    folder = sglang_versions / version
    facts = wire_requests.facts_of(folder)
    era = wire_requests.era_of(facts)
    sent = wire_requests.sent_requests(era, facts, monkeypatch)
    name, body = sent[0]
    control = (name, json.dumps({**json.loads(body), MISSPELT: "1"}))
    wire = json.loads(config_json(wire_requests.ADAPTER))
    asked = {"requests": [*sent, control], "adapter": wire}
    told = told_by(sglang_python, folder, asked, tmp_path / "asked.json")

    assert told["version"] == facts.version == version
    *read, misread = told["requests"]
    assert misread["unlisted"] == [MISSPELT], "the control: what a version does not list is noticed"
    for (request, text), found in zip(sent, read, strict=True):
        assert found["request"] == request
        assert found["unlisted"] == [], f"{version} would ignore them without a word"
        plain = {field: value for field, value in json.loads(text).items() if field not in PAYLOADS}
        assert found["values"] == plain
        ranks = wire_requests.RANKS if request == UPDATE_REQUEST else len(found["ranks"])
        assert len(found["ranks"]) == ranks
        for rank in found["ranks"]:
            assert rank == {"container": CONTAINERS[request], "tensors": expected_tensors(request)}
    carried = [request for request, _ in sent if request in CONTAINERS]
    assert carried == [UPDATE_REQUEST, *([LOAD_REQUEST] if wire_requests.takes_adapters(era) else [])]
    if told["adapter"] is not None:
        assert told["adapter"] == {"rank": 2, "alpha": 8.0, "targets": ["k_proj", "q_proj", "v_proj"]}
    matrix_result.requests(
        version,
        era=era.era,
        read=sorted({request for request, _ in sent}),
        adapter_config=told["adapter"] is not None,
    )
