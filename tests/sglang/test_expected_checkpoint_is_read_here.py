"""Names and shapes to check against, from the server's checkpoint folder as this process sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.contexts import RolloutTarget
from weightlane.errors import EngineError
from weightlane_sglang.http_endpoint import SglangEndpoint

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
