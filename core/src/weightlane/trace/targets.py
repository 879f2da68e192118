"""The receiver tensors of a model while twins stand in their place: names, numbers, descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightlane.packing import dtype_name
from weightlane.trace.recorder import storage_key
from weightlane.trace.table import Obstacle, TracedTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from weightlane.trace.recorder import Recorder
    from weightlane.trace.table import TargetKind
    from weightlane.trace.tracing import Receiver
    from weightlane.trace.twins import Twin, Twins

NON_PERSISTENT = "a buffer that no checkpoint holds: the engine makes it itself"


@dataclass(slots=True)
class Target:
    """One twin with all its names, what it is, and why it need not be written ("" if it must be)."""

    twin: Twin
    kind: TargetKind
    names: list[str]
    owned: str


def find_targets(receiver: Receiver, twins: Twins) -> list[Target]:
    """Every twin once: parameters first, then buffers, then what only attributes hold."""
    by_tensor: dict[int, Target] = {}
    twin_of = {id(twin.tensor): twin for twin in twins.of.values()}

    def add(name: str, tensor: Tensor, kind: TargetKind, owned: str) -> None:
        known = by_tensor.get(id(tensor))
        if known is None:
            by_tensor[id(tensor)] = Target(twin_of[id(tensor)], kind, [name], owned)
        else:
            known.names.append(name)
            known.owned = known.owned and owned

    for name, parameter, _ in _held(receiver.model, "_parameters"):
        add(name, parameter, "parameter", receiver.owned(name, parameter))
    for name, buffer, saved in _held(receiver.model, "_buffers"):
        add(name, buffer, "buffer", receiver.owned(name, buffer) if saved else NON_PERSISTENT)
    for twin in twins.of.values():
        if id(twin.tensor) not in by_tensor:
            add(twin.place, twin.tensor, "attribute", receiver.owned(twin.place, twin.tensor))
    return list(by_tensor.values())


def _held(model: nn.Module, kind: str) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, tensor, whether checkpoints hold it; under every name. Not asked of the model: it may filter."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None:
                persistent = name not in module._non_persistent_buffers_set
                yield (f"{prefix}.{name}" if prefix else name), tensor, persistent


def standing(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each name stands for, by object and by memory."""
    held = (*_held(model, "_parameters"), *_held(model, "_buffers"))
    return {name: (id(tensor), storage_key(tensor)) for name, tensor, _ in held}


def note_rebound(model: nn.Module, before: dict[str, tuple[int, int]], recorder: Recorder) -> None:
    """An obstacle for each name that no longer stands for the tensor that it stood for."""
    after = standing(model)
    for name in (*before, *(name for name in after if name not in before)):
        if before.get(name) != after.get(name):
            what = "was removed" if name not in after else "is another tensor after the load"
            if name not in before:
                what = "was added by the load"
            recorder.obstacles.append(Obstacle("rebound", "", (), (name,), f"it {what}"))


def note_reformed(targets: Sequence[Target], recorder: Recorder) -> None:
    """An obstacle for each twin that has another shape or layout after the load than before, or other memory.

    As by an assignment to `data`. The next load would find the live tensor so.
    """
    told = {name for item in recorder.obstacles for name in item.targets}
    for number, item in enumerate(targets):
        twin, model = item.twin.tensor, item.twin.model
        same = _looks_alike(twin, model) and twin.storage_offset() == recorder.starts[number]
        stays = same and recorder.target_of.get(storage_key(twin)) == number
        if not stays and item.names[0] not in told:
            what = f"it has shape {list(twin.shape)} and strides {list(twin.stride())} after the load"
            recorder.block("rebound", "", [], number, what)


def describe_targets(targets: Sequence[Target]) -> tuple[TracedTarget, ...]:
    """As the table holds them; targets that share live memory share a number."""
    storages: dict[object, int] = {}
    described: list[TracedTarget] = []
    for item in targets:
        form, live = item.twin.model, item.twin.live
        same = live is not None and _looks_alike(form, live)
        # Live tensors on the meta device have no address: each is its own memory.
        shared = same and live is not None and not live.is_meta and live.numel() > 0
        key = (_memory_of(live), live.dtype) if shared and live is not None else id(form)
        described.append(
            TracedTarget(
                name=item.names[0],
                shape=tuple(form.shape),
                stride=tuple(form.stride()),
                dtype=dtype_name(form.dtype),
                kind=item.kind,
                storage=storages.setdefault(key, len(storages)),
                offset=int(live.storage_offset()) if shared and live is not None else 0,
                aliases=tuple(item.names[1:]),
                owned=item.owned,
                form="live" if same else "checkpoint",
            )
        )
    return tuple(described)


def _looks_alike(form: Tensor, live: Tensor) -> bool:
    return (form.shape, form.stride(), form.dtype) == (live.shape, live.stride(), live.dtype)


def _memory_of(live: Tensor) -> int:
    """Where its memory is; where that was let go, as while an engine sleeps, the storage stands for it."""
    return live.untyped_storage().data_ptr() or storage_key(live)
