"""Which factor of an expert adapter is which: peft's releases disagree, under the same names.

A parameter of three axes holds a stack of experts (`target_parameters`), and its pair of matrices holds every
expert's: A (rank * experts, in), where an expert's rows follow one another, and B (out, rank * experts),
where an expert's columns are `experts` apart. What is "in" and what "out" was read from the parameter's own
axes, and since peft 0.19.1 from the module's `is_transposed`. Read in the releases:

* until 0.18: in is the parameter's second axis, out its third, however it is stored;
* 0.19.0: the same, but turned round for a module that says `is_transposed`;
* since 0.19.1: in and out are those of the module, for both ways of storing.

So a pair is turned round by its shape where that tells, else by the release that was recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from packaging.version import Version

from weightlane.errors import PlanError, Problem
from weightlane.peft.patterns import release_of

if TYPE_CHECKING:
    from torch import Tensor

Storage: TypeAlias = Literal["out-in", "in-out"]
"""The order of a parameter's second and third axis; `in-out` is what transformers calls `is_transposed`."""

AxisOrder: TypeAlias = Literal["as-named", "turned"]
"""`as-named`: A reads the module's inputs, B writes its outputs. `turned`: the other way round."""

_FIRST_RIGHT = Version("0.19.1")
_ONCE_TURNED = Version("0.19.0")


def axis_order(
    name: str,
    *,
    parameter: tuple[int, int, int],
    storage: Storage,
    first: tuple[int, ...],
    second: tuple[int, ...],
    peft_version: str = "",
) -> AxisOrder:
    """How the pair of a parameter that holds experts is to be read.

    Args:
        name: of the parameter, for messages.
        parameter: its shape (experts, then the two axes in the order of `storage`).
        storage: which axis is which.
        first: shape of A.
        second: shape of B.
        peft_version: the release that made the adapter, "" where it is not recorded.

    Raises:
        PlanError: the matrices fit the parameter neither way; or both, and no release is recorded.
    """
    out, inputs = parameter[1:] if storage == "out-in" else parameter[:0:-1]
    inner_fits = len(first) == len(second) == 2 and first[0] == second[1] and first[0] % parameter[0] == 0
    fits: dict[AxisOrder, bool] = {
        "as-named": inner_fits and (first[1], second[0]) == (inputs, out),
        "turned": inner_fits and (first[1], second[0]) == (out, inputs),
    }
    possible = [order for order, right in fits.items() if right]
    if not possible:
        what = (
            f"matrices of shape {list(first)} and {list(second)} fit a parameter of shape {list(parameter)} "
            "neither way"
        )
        raise PlanError([Problem("adapter-tensor", name, what)])
    if len(possible) == 1:
        return possible[0]
    release = release_of(peft_version)
    if release is None:
        what = (
            "its experts are square, so that shapes do not tell which matrix reads the inputs, and the "
            "adapter has no peft_version"
        )
        raise PlanError([Problem("adapter-tensor", name, what, "Record the release in peft_version.")])
    if release >= _FIRST_RIGHT:
        return "as-named"
    return "turned" if storage == "out-in" or release == _ONCE_TURNED else "as-named"


def as_named(first: Tensor, second: Tensor, *, experts: int, order: AxisOrder) -> tuple[Tensor, Tensor]:
    """The pair with A reading inputs and B writing outputs, both in the flat order that peft uses.

    Args:
        first: A, (rank * experts, x).
        second: B, (y, rank * experts).
        experts: how many are stacked.
        order: what `axis_order` told; the pair is given back as it is where it is right already.

    Returns:
        A (rank * experts, in) and B (out, rank * experts), in memory of their own where they were turned.
    """
    if order == "as-named":
        return first, second
    inner = first.shape[0]
    rank = inner // experts
    # A lists expert by expert, B rank by rank: each is laid out anew in the order of the other.
    rows = second.reshape(second.shape[0], rank, experts).permute(2, 1, 0).reshape(inner, -1)
    columns = first.reshape(experts, rank, first.shape[1]).permute(2, 1, 0).reshape(-1, inner)
    return rows.contiguous(), columns.contiguous()


def by_expert(first: Tensor, second: Tensor, *, experts: int) -> tuple[Tensor, Tensor]:
    """One matrix an expert of a pair that is as named.

    Returns:
        A (experts, rank, in) and B (experts, out, rank), in memory of their own.
    """
    rank = first.shape[0] // experts
    rows = first.reshape(experts, rank, first.shape[1])
    columns = second.reshape(second.shape[0], rank, experts).permute(2, 0, 1)
    return rows.contiguous(), columns.contiguous()
