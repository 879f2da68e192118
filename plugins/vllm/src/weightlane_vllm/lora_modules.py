"""Names of an adapter's modules towards a model class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane_vllm.experts import one_expert

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weightlane_vllm.mapper import NameMapper


def receiver_modules(
    modules: Sequence[str], mapper: NameMapper, projections: Mapping[str, str]
) -> list[str | None]:
    """The receiver's name of each module, None where its mapper passes over it.

    Renamed, never stacked: an adapter of `q_proj` stays one of `q_proj`. `projections` are the receiver's
    words for those of one expert (`gate_proj` is `w1` in some families); modules that are no expert's keep
    theirs.
    """
    found: list[str | None] = []
    for module in modules:
        renamed = mapper.renamed(module)
        if renamed is not None and one_expert(f"{renamed}.weight") is not None:
            holder, _, projection = renamed.rpartition(".")
            renamed = f"{holder}.{projections.get(projection, projection)}"
        found.append(renamed)
    return found
