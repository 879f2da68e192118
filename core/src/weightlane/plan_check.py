"""What a receiver checks of a plan before it accepts it, whoever sent it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from weightlane.buckets import ALIGNMENT, MOST_BUCKETS, MOST_SLOTS, wire_nbytes
from weightlane.errors import MOST_WITH_NEAR_NAMES, Problem, near_names
from weightlane.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.buckets import BucketLayout
    from weightlane.messages import ReceivePlan, WireTensor
    from weightlane.receiver import BeyondExpected, ExpectedTensor

_MOST_ELEMENTS = (1 << 63) - 1


def check_layout(plan: ReceivePlan) -> list[Problem]:
    """Problems of the plan in itself: names twice, unknown dtypes, layouts that do not hold their tensors."""
    problems = _check_tensors(plan)
    order: list[int] = []
    for position, layout in enumerate(plan.buckets):
        problems += _check_bucket(plan, position, layout)
        order += [entry.tensor for entry in layout.entries]
    if order != list(range(len(plan.tensors))):
        problems.append(Problem("layout", "buckets", "they do not carry every tensor exactly once, in order"))
    if len(plan.buckets) > MOST_BUCKETS:
        problems.append(Problem("layout", "buckets", f"{len(plan.buckets)} are more than {MOST_BUCKETS}"))
    if not plan.buckets:
        problems.append(Problem("layout", "buckets", "the plan has none, so nothing could mark the end"))
    return problems


def _check_tensors(plan: ReceivePlan) -> list[Problem]:
    problems: list[Problem] = []
    seen: set[str] = set()
    for tensor in plan.tensors:
        if tensor.name in seen:
            problems.append(Problem("duplicate-name", tensor.name, "the plan sends this name twice"))
        seen.add(tensor.name)
        if tensor.dtype not in DTYPE_BYTES:
            near = near_names(tensor.dtype, DTYPE_BYTES)
            problems.append(Problem("dtype", tensor.name, f"dtype {tensor.dtype!r} cannot travel", near=near))
        if any(size < 0 for size in tensor.shape):
            problems.append(Problem("shape", tensor.name, f"shape {list(tensor.shape)} has a negative size"))
        elif math.prod(max(size, 1) for size in tensor.shape) > _MOST_ELEMENTS:
            # Zeros do not count: torch computes strides, which overflow also where nothing is held.
            problems.append(Problem("shape", tensor.name, f"shape {list(tensor.shape)} cannot be"))
    return problems


def _check_bucket(plan: ReceivePlan, position: int, layout: BucketLayout) -> list[Problem]:
    problems: list[Problem] = []
    where = f"bucket {layout.index}"
    if layout.index != position or layout.last != (position == len(plan.buckets) - 1):
        problems.append(
            Problem("layout", where, "buckets are not numbered in order, or the last is not marked")
        )
    if not 0 <= layout.slot < MOST_SLOTS:
        problems.append(Problem("layout", where, f"slot {layout.slot} does not exist"))
    if layout.nbytes < 0:
        problems.append(Problem("layout", where, f"it is {layout.nbytes} bytes long"))
    end = 0
    for entry in layout.entries:
        if not 0 <= entry.tensor < len(plan.tensors):
            problems.append(Problem("layout", where, f"tensor number {entry.tensor} does not exist"))
            continue
        wire = plan.tensors[entry.tensor]
        if wire.dtype in DTYPE_BYTES and entry.nbytes != wire_nbytes(wire):
            problems.append(
                Problem("layout", wire.name, f"{entry.nbytes} bytes planned, {wire_nbytes(wire)} needed")
            )
        if entry.offset % ALIGNMENT or entry.offset < end or entry.offset + entry.nbytes > layout.nbytes:
            problems.append(
                Problem("layout", wire.name, f"offset {entry.offset} in {where} is unaligned or outside")
            )
        end = entry.offset + entry.nbytes
    return problems


def left_to_the_trace(problems: Sequence[Problem], beyond: BeyondExpected | None) -> list[Problem]:
    """Without those of names that are not expected, where a trace tells whether they are taken."""
    return [problem for problem in problems if beyond is None or problem.kind != "extra-name"]


def check_against_expected(
    tensors: Sequence[WireTensor], expected: Sequence[ExpectedTensor], *, receiver: str
) -> list[Problem]:
    """Missing, extra and mis-shaped tensors of a full sync, against the checkpoint the receiver expects."""
    wanted = {item.name: item for item in expected}
    sent = {tensor.name: tensor for tensor in tensors}
    extra = [name for name in sent if name not in wanted]
    missing = [item.name for item in expected if item.name not in sent and not item.tied_to]
    problems = [
        Problem(
            "shape",
            name,
            f"exported with shape {list(sent[name].shape)}, but {receiver} expects "
            f"{list(wanted[name].shape)}",
        )
        for name in sent
        if name in wanted and wanted[name].shape != sent[name].shape
    ]
    for number, name in enumerate(extra):
        near = near_names(name, missing) or near_names(name, wanted) if number < MOST_WITH_NEAR_NAMES else ()
        problems.append(Problem("extra-name", name, f"{receiver} has no tensor of this name", near=near))
    for number, name in enumerate(missing):
        near = near_names(name, extra) if number < MOST_WITH_NEAR_NAMES else ()
        what = f"{receiver} expects it and no trainer rank exports it"
        problems.append(Problem("missing-name", name, what, near=near))
    return problems
