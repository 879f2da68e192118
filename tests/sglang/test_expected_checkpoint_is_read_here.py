"""Names and shapes to check against, from the server's checkpoint folder as this process sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.contexts import RolloutTarget
from weightlane.errors import EngineError, PlanError
from weightlane_sglang.endpoint import SglangEndpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.receiver import WorkerDescription


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    made = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, vocab_size=16, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(made)
    return made


def describe(
    fake_server: Any,
    answer: Any,
    model_path: object,
    *,
    named: object = "",
    architectures: Sequence[str] = ("Qwen3ForCausalLM",),
) -> tuple[WorkerDescription, ...]:
    info = {"model_path": str(model_path), "weight_version": "3", "architectures": list(architectures)}
    fake_server.answers["/model_info"] = answer(info)
    endpoint = SglangEndpoint(
        RolloutTarget("sglang", address=fake_server.url, model=str(named)), timeout_seconds=5
    )
    try:
        return endpoint.describe_workers("sglang")
    finally:
        endpoint.close()


def test_the_server_s_own_folder_serves_where_it_can_be_read(
    fake_server: Any, answer: Any, folder: Path
) -> None:
    (worker,) = describe(fake_server, answer, folder)
    expected = {tensor.name: tensor for tensor in worker.expected}
    assert expected["model.embed_tokens.weight"].shape == (16, 8)
    assert expected["model.embed_tokens.weight"].dtype == "float32", "the server's --dtype"
    assert expected["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert (worker.worker, worker.workers, worker.held_version) == (0, 1, 3)
    assert worker.facts is not None
    assert worker.incarnation


def test_a_folder_that_the_user_names_comes_first(fake_server: Any, answer: Any, folder: Path) -> None:
    (worker,) = describe(fake_server, answer, "/another/machine/model", named=folder)
    assert len(worker.expected) > 5


def test_no_readable_folder_asks_for_one(fake_server: Any, answer: Any) -> None:
    with pytest.raises(EngineError, match=r"Pass model=DIR") as caught:
        describe(fake_server, answer, "/another/machine/model")
    assert "/another/machine/model" in str(caught.value)


def test_a_relative_path_of_the_server_is_not_looked_up_here(
    fake_server: Any, answer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert Path(folder.name).exists()
    with pytest.raises(EngineError, match=r"Pass model=DIR"):
        describe(fake_server, answer, folder.name)


def test_a_folder_of_another_architecture_is_refused(fake_server: Any, answer: Any, folder: Path) -> None:
    with pytest.raises(EngineError, match="LlamaForCausalLM"):
        describe(fake_server, answer, folder, architectures=["LlamaForCausalLM"])


AWQ = {"quant_method": "awq", "bits": 4}


@pytest.mark.parametrize(
    ("added", "subject", "method"),
    [
        ({"quantization_config": AWQ}, "quantization_config", "awq"),
        ({"text_config": {"quantization_config": AWQ}}, "text_config.quantization_config", "awq"),
        ({"compression_config": {"bits": 8}}, "compression_config", "an unnamed method"),
    ],
)
def test_a_quantised_checkpoint_is_refused_though_the_server_tells_of_none(
    fake_server: Any,
    answer: Any,
    folder: Path,
    tmp_path: Path,
    added: dict[str, Any],
    subject: str,
    method: str,
) -> None:
    assert fake_server.answers["/server_info"].body["quantization"] is None
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **added}))
    with pytest.raises(PlanError) as caught:
        describe(fake_server, answer, tmp_path)
    (problem,) = caught.value.problems
    assert (problem.kind, problem.subject) == ("capability", subject)
    assert f"({method})" in problem.what


def test_a_quantised_checkpoint_of_modelopt_is_refused_by_its_own_file(
    fake_server: Any, answer: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert describe(fake_server, answer, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(PlanError, match="modelopt"):
        describe(fake_server, answer, tmp_path)


def test_a_plain_twin_named_by_the_user_does_not_hide_that_the_served_one_is_quantised(
    fake_server: Any, answer: Any, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ}))
    with pytest.raises(PlanError, match="awq"):
        describe(fake_server, answer, tmp_path, named=folder)
