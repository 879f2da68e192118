from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.demo.settings import REAL_LESSON, TINY_LESSON, Lesson, lesson_for

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("nbytes", "lesson"), [(1_000_000, TINY_LESSON), (30_000_000, REAL_LESSON)])
def test_weights_decide_how_gently_a_checkpoint_is_trained(
    tmp_path: Path, nbytes: int, lesson: Lesson
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(nbytes)
    assert lesson_for(tmp_path) is lesson


def test_lora_learns_faster_and_from_more_samples_since_it_has_less_to_learn_with() -> None:
    assert lesson_for(None, "adapter") == lesson_for(None, "merged")
    assert lesson_for(None, "adapter").prompts > TINY_LESSON.prompts
    assert lesson_for(None, "adapter").learning_rate > TINY_LESSON.learning_rate


def test_an_actor_in_mode_adapter_trains_its_matrices_alone_and_they_are_equal_on_every_rank(
    tmp_path: Path,
) -> None:
    from weightlane.demo.model import architecture_of, load_actor, write_tiny_model

    write_tiny_model(tmp_path, seed=0)
    first, second = (load_actor(str(tmp_path), trainer="torch", mode="adapter", seed=3) for _ in range(2))
    trained = {name: item for name, item in first.named_parameters() if item.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    other = dict(second.named_parameters())
    assert all(bool((item == other[name]).all()) for name, item in trained.items())
    assert architecture_of(first) == "LlamaForCausalLM"


def test_without_a_checkpoint_it_is_the_tiny_models(tmp_path: Path) -> None:
    assert lesson_for(None) is TINY_LESSON
    assert lesson_for(tmp_path) is REAL_LESSON, "unknown sizes are treated gently"
