from __future__ import annotations

from types import ModuleType

import pytest

from weightlane_vllm.patches import PlainCpuWeights


@pytest.mark.parametrize("before", [True, False])
def test_undo_puts_back_what_was_there(before: bool) -> None:
    fake_ops = ModuleType("fake_ops")
    fake_ops._supports_onednn = before
    patch = PlainCpuWeights(fake_ops)
    patch.apply()
    patch.apply()
    assert (fake_ops._supports_onednn, patch.active) == (False, True)
    patch.undo()
    patch.undo()
    assert (fake_ops._supports_onednn, patch.active) == (before, False)
