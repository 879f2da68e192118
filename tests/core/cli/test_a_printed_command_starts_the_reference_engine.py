"""What `launch-args` prints for the reference engine starts, in a shell, an engine that a lane reaches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import weightlane as wl
from weightlane.front.process import start_front_process
from weightlane.front.socket_folder import RUNTIME_VARIABLE, socket_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Run


@pytest.mark.timeout(180)
def test_the_printed_command_starts_an_engine_that_a_lane_reaches(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path / "my model"
    model.save_pretrained(folder)
    with socket_folder() as private:
        monkeypatch.setenv(RUNTIME_VARIABLE, str(private))
        words = ("launch-args", "reference", "--model", str(folder), "--device", "cpu")
        printed = run(*words).out
        address = run(*words, "--json").document["address"]
        assert address == f"unix:{private}/weightlane/reference.sock"
        assert sys.executable in printed
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with start_front_process(
            ["/bin/sh", "-c", printed], address, log=tmp_path / "log", ready_timeout_seconds=120.0
        ):
            with torch.no_grad():
                model.lm_head.weight.mul_(-1.0)
            with wl.connect(
                trainer=wl.trainer("torch", model=model), rollout=[wl.rollout("reference", url=address)]
            ) as lane:
                lane.sync(version=7)
                (answer,) = lane.replicas[0].generate([[1, 2, 3]], max_tokens=1)
    with torch.no_grad():
        row = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)
    assert (answer.weight_version, answer.token_ids) == (7, (int(row.argmax()),))
    assert abs(answer.logprobs[0] - float(row.max())) < 1e-4
