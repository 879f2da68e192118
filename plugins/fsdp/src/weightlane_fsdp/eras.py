"""The eras of torch that this plugin knows: FSDP2 as a public module, and FSDP2 below `_composable`.

FSDP1 is the same in both. Which one it is, is asked of the installed source, never of its version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from weightlane.probes import NotViable, ProbeResult, Viable, require_attributes
from weightlane.types import BackendDescriptor, Capability
from weightlane_fsdp.facts import (
    COMPOSABLE_FSDP2,
    DISTRIBUTIONS,
    ENGINE,
    FLAT_RECORD,
    PUBLIC_FSDP2,
    SHARD_RECORD,
)
from weightlane_fsdp.options import NAMES

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts

PUBLIC = "public-fsdp2"
COMPOSABLE = "composable-fsdp2"


def probe_public(facts: EngineFacts) -> ProbeResult:
    """FSDP2 is a public module and remembers shards; FSDP1 remembers ranges."""
    return require_attributes(facts, (PUBLIC_FSDP2, SHARD_RECORD, FLAT_RECORD))


def probe_composable(facts: EngineFacts) -> ProbeResult:
    """FSDP2 lies below `_composable`, and nowhere else."""
    older = require_attributes(facts, (COMPOSABLE_FSDP2, FLAT_RECORD))
    if isinstance(older, NotViable):
        return older
    if facts.attributes.get(PUBLIC_FSDP2, False):
        return NotViable(f"torch defines {PUBLIC_FSDP2}, so FSDP2 is public")
    return Viable((*older.evidence, f"{PUBLIC_FSDP2} is absent"))


_CAPABILITIES = frozenset(
    {
        Capability.EXPORT_FULL,
        Capability.EXPORT_MERGED,
        Capability.EXPORT_BASE,
        Capability.EXPORT_ADAPTER,
    }
)
_INSTALL_HINT = "pip install 'weightlane-fsdp' torch"

ERAS = (
    BackendDescriptor(
        name="fsdp",
        role="trainer",
        engine=ENGINE,
        era=PUBLIC,
        versions=SpecifierSet(">=2.6"),
        distributions=DISTRIBUTIONS,
        probe=probe_public,
        capabilities=_CAPABILITIES,
        options=NAMES,
        summary="FSDP1, FSDP2, HSDP, tensor parallel meshes, DDP and plain modules",
        install_hint=_INSTALL_HINT,
    ),
    BackendDescriptor(
        name="fsdp",
        role="trainer",
        engine=ENGINE,
        era=COMPOSABLE,
        versions=SpecifierSet(">=2.4,<2.6"),
        distributions=DISTRIBUTIONS,
        probe=probe_composable,
        capabilities=_CAPABILITIES,
        options=NAMES,
        summary="the same with FSDP2 as torch 2.4 and 2.5 have it",
        install_hint=_INSTALL_HINT,
    ),
)
