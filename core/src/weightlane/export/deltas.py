"""The arithmetic of merging: what an adapter's matrices add to a weight, in float32, without writing to any.

peft computes a delta in the matrices' own dtype and adds it in the weight's; here everything is float32
(float64 where the weight is) until one rounding to the weight's dtype at the end. For float32 both are the
same operations in the same order, so results are equal bit for bit. Formulas: `get_delta_weight` and the
DoRA variants of peft 0.12 to 0.21.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, dtype


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's change of one weight: two matrices, a scale, and DoRA's magnitudes where it has them.

    Shapes: A (rank, in), B (out, rank), magnitudes (out,) or, of a transposed weight, its other side.
    `transposed`: the weight is stored (in, out), as an embedding's and Conv1D's are.
    """

    scaling: float
    transposed: bool = False
    magnitudes: bool = False

    @property
    def matrices(self) -> int:
        """How many sources this takes."""
        return 3 if self.magnitudes else 2

    def added(self, now: Tensor, base: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """`now` with this change; `base` is the weight before any adapter, which DoRA norms."""
        from torch import linalg

        first, second = (_like(item, base) for item in sources[:2])
        product: Tensor = second.flatten(1) @ first.flatten(1)
        delta = (product.T if self.transposed else product) * self.scaling
        if base.dim() > 2:
            delta = delta.reshape(base.shape)  # convolutions: (out, in * kernel)
        changed: Tensor = now + delta
        if not self.magnitudes:
            return changed
        norms = linalg.vector_norm(base + delta, dim=0 if self.transposed else 1)
        factor: Tensor = (_like(sources[2], base).reshape(-1) / norms).view(-1, 1)
        return changed * (factor.T if self.transposed else factor)


@dataclass(frozen=True, slots=True)
class ExpertLowRank:
    """One adapter's change of a fused parameter of experts, of shape (experts, rows, columns).

    Shapes: A (rank * experts, in), B (out, rank * experts), whose second axis counts experts fastest.
    `rows_in`: rows are input features, as in peft before 0.21 and in layers that store them so.
    """

    scaling: float
    experts: int
    rows_in: bool
    matrices = 2

    def added(self, now: Tensor, base: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """`now` with this change, all experts at once."""
        import torch

        first, second = (_like(item, base) for item in sources)
        first = first.reshape(self.experts, -1, first.shape[-1])
        second = second.reshape(second.shape[0], -1, self.experts)
        order = "ore,eri->eio" if self.rows_in else "ore,eri->eoi"
        return now + torch.einsum(order, second, first) * self.scaling

    def added_to_one(self, now: Tensor, expert: int, sources: Sequence[Tensor]) -> Tensor:
        """One expert's (rows, columns) with this change, so that others need not be made with it."""
        first, second = sources
        # Cut out, then cast: to cast every expert's matrices for each of them would take their square.
        first = _like(first.reshape(self.experts, -1, first.shape[-1])[expert], now)
        second = _like(second.reshape(second.shape[0], -1, self.experts)[:, :, expert], now)
        product = second @ first
        return now + (product.T if self.rows_in else product) * self.scaling


@dataclass(frozen=True, slots=True)
class BiasStep:
    """The bias of an adapter's second matrix, added to the layer's own."""

    scaling: float
    matrices = 1

    def added(self, now: Tensor, base: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """`now` with this change."""
        return now + _like(sources[0], base) * self.scaling


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding that are trained by themselves, of shape (tokens, columns); they take the place of
    the base's."""

    rows: tuple[int, ...]
    matrices = 1

    def added(self, now: Tensor, base: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """`now` with these rows."""
        import torch

        index = torch.tensor(self.rows, device=now.device)
        return now.index_copy(0, index, _like(sources[0], base))


def wide_dtype(own: dtype) -> dtype:
    """What a weight of this dtype is merged in."""
    import torch

    return torch.float64 if own is torch.float64 else torch.float32


def _like(tensor: Tensor, base: Tensor) -> Tensor:
    return tensor.to(device=base.device, dtype=base.dtype)
