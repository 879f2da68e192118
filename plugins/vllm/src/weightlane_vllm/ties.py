"""Which checkpoint tensors a live model really reads through another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane_vllm.names import resolve

if TYPE_CHECKING:
    from weightlane.receiver import ExpectedTensor
    from weightlane_vllm.namespace import Namespace


def live_owner(tensor: ExpectedTensor, space: Namespace) -> str:
    """The tensor whose storage the model reads for `tensor`, "" where it holds one of its own.

    A configuration's word is not enough: that of a composite model may have a flag in two places, and
    engines have read the wrong one. Live names list a tensor that is shared once, so a second one is its own.
    """
    if not tensor.tied_to:
        return ""
    own, owner = resolve(tensor.name, space).target, resolve(tensor.tied_to, space).target
    return "" if own and own != owner else tensor.tied_to
