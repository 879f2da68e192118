"""Is the base that a receiver holds the one that an adapter was trained on? Told by the values themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import Problem, near_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_MOST_NAMED = 8
_FIX = (
    "Start the engine from the checkpoint that the trainer's base was loaded from, or use mode merged or "
    "full, or a trainer and an engine between which the base can be sent."
)


def value_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Sixteen hex digits a tensor, over its shape and values.

    Floating values below 32 bits are widened first, which is exact: a checkpoint in bfloat16 has the same
    digests in an engine that keeps it and in a trainer that widened it to float32.
    """
    return {name: value_digest(tensor) for name, tensor in tensors.items()}


def value_digest(tensor: Tensor) -> str:
    """The digest of one tensor; see `value_digests`."""
    import torch
    import xxhash

    from weightlane.packing import memory_of

    plain = tensor.detach().to("cpu")
    if plain.is_floating_point() and plain.element_size() < torch.float32.itemsize:
        plain = plain.to(torch.float32)
    digest = xxhash.xxh3_64(f"{list(plain.shape)} {plain.dtype}".encode())
    digest.update(memory_of(plain.contiguous()))
    return digest.hexdigest()


def base_problems(
    trained_on: Mapping[str, str], held: Mapping[str, str], tied: Mapping[str, str], *, receiver: str
) -> list[Problem]:
    """Where the receiver's base differs from the trainer's, by tensor.

    Args:
        trained_on: digests of the trainer's base, by checkpoint name.
        held: digests of what the receiver holds, likewise.
        tied: names whose storage is another tensor's in the receiver; the trainer may leave them out.
        receiver: how to call the receiver in messages.
    """
    if not trained_on:
        what = "the trainer told nothing about the base that the adapter was trained on"
        return [Problem("residency", "base", what, "Report this to the trainer's plugin.")]
    problems = _names(
        [name for name in held if name not in trained_on and name not in tied],
        f"{receiver} holds it and the trainer's base has no such tensor",
        trained_on,
    )
    problems += _names(
        [name for name in trained_on if name not in held],
        f"the trainer's base has it and {receiver} holds no such tensor",
        held,
    )
    differing = [name for name in trained_on if name in held and held[name] != trained_on[name]]
    shown = differing[:_MOST_NAMED]
    problems += [
        Problem(
            "residency",
            name,
            f"{receiver} holds other values than the base that the adapter was trained on"
            + (f"; so for {len(differing) - 1} more" if number == 0 and len(differing) > 1 else ""),
            _FIX,
        )
        for number, name in enumerate(shown)
    ]
    return problems


def _names(names: list[str], what: str, candidates: Mapping[str, str]) -> list[Problem]:
    return [
        Problem("residency", name, what, _FIX, near=near_names(name, candidates))
        for name in names[:_MOST_NAMED]
    ]
