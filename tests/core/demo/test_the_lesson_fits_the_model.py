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


def test_without_a_checkpoint_it_is_the_tiny_models(tmp_path: Path) -> None:
    assert lesson_for(None) is TINY_LESSON
    assert lesson_for(tmp_path) is REAL_LESSON, "unknown sizes are treated gently"
