"""A contract: what one version of an engine does with the checkpoint of one architecture, in patterns.

It is made from placement tables (`contract_making`), written as text that reads well in a diff
(`contract_text`), and holds for any number of layers and any sizes. A plan for an engine that cannot be
entered is made from it (`assumed`), and two of them tell what a new release changed (`contract_diff`).
"""

from __future__ import annotations

import msgspec

from weightlane.trace.patterns import ALL_LAYERS, Numbered, meant_by, numbered

WHOLE = "whole"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where elements of one source land in one target, in words that hold for any sizes.

    Attributes:
        target: the pattern of the receiver's tensor.
        where: `whole`; `rows 1 of 3` of what is packed in it; `slice {expert}`; both of these; or
            `elements of its own` where they fill no box.
        taken: which part of the source, as `rows 2 of 3`; "" for all of it.
        split: `rows`, `columns` or `axis N` where each tensor-parallel worker takes its own; "" where all
            take the same.
        order: `transposed` or `rearranged`; "" where elements follow one another as in the source.
        dtype: the target's, where it is not what most targets of the model have.
        via: dtypes that a value passes through on its way.
        padded: the loader fills the rest of the target with a constant.
    """

    target: str
    where: str = WHOLE
    taken: str = ""
    split: str = ""
    order: str = ""
    dtype: str = ""
    via: tuple[str, ...] = ()
    padded: bool = False


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pattern of checkpoint names: what the loader is to be given, and where it puts it.

    `wire` is the pattern of the name that travels, `layers` those that this is true for, in words. Without
    places, `dropped` says why none of it lands.
    """

    source: str
    wire: str
    layers: str = ALL_LAYERS
    places: tuple[Place, ...] = ()
    dropped: str = ""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something true of receiver tensors of one pattern: why the engine owns them, their second name."""

    target: str
    what: str
    layers: str = ALL_LAYERS


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that the loader does which is no plain placement: an obstacle, in patterns."""

    kind: str
    operator: str
    names: tuple[str, ...] = ()


class ContractGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Patterns of sources that are packed into one target, and must travel in one load."""

    target: str
    sources: tuple[str, ...]


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One (engine, version, architecture, tensor parallelism, LoRA); lines in the model's own order."""

    engine: str
    engine_version: str
    architecture: str
    tensor_parallel: int
    lora: bool
    style: str
    lines: tuple[Line, ...]
    owned: tuple[Note, ...] = ()
    aliases: tuple[Note, ...] = ()
    uncovered: tuple[Note, ...] = ()
    refused: tuple[Refused, ...] = ()

    @property
    def title(self) -> str:
        """Engine, version and architecture, with what is not the plainest."""
        more = f" at tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        lora = " with LoRA" if self.lora else ""
        return f"{self.engine} {self.engine_version} {self.architecture}{more}{lora}"

    @property
    def groups(self) -> tuple[ContractGroup, ...]:
        """Targets with more than one pattern of sources, or one source for each expert."""
        found: dict[str, dict[str, None]] = {}
        for line in self.lines:
            for place in line.places:
                found.setdefault(place.target, {})[line.source] = None
        return tuple(
            ContractGroup(target, tuple(sources))
            for target, sources in found.items()
            if len(sources) > 1 or any("{expert}" in source for source in sources)
        )

    def line_of(self, name: str) -> tuple[Line, Numbered] | None:
        """The line that a checkpoint name falls under, and the name's own numbers; None where none does.

        Which layers are of which kind is the configuration's affair. A layer of a kind that the snapshot has
        elsewhere only falls under that line, where there is one alone.
        """
        key = numbered(name)
        alike = [line for line in self.lines if line.source == key.pattern]
        here = [line for line in alike if meant_by(line.layers, key.layer)]
        if here:
            return here[0], key
        return (alike[0], key) if len(alike) == 1 and key.layer is not None else None
