"""Stands in for an engine that somebody else wrote: named weights in this process, and a version."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class AcmeEngine:
    """Holds weights by checkpoint name and serves one version of them."""

    release = "2.4"

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self.serves: int | None = None
