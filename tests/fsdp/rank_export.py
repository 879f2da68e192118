"""Exports of the fsdp plugin, and what they must equal: the same recipes over a model that nothing wraps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from fsdp_wrappers import DEVICE
from msgspec.structs import replace

from weightlane.export.recipe import Source
from weightlane.export.recipes import recipes
from weightlane.facts import no_facts
from weightlane.packing import dtype_name
from weightlane.probes import Viable
from weightlane.testing.rank_export import RankExport, Wished, export_of
from weightlane.types import Phase
from weightlane.waiting import nothing_to_check
from weightlane_fsdp import plugin
from weightlane_fsdp.eras import ERAS
from weightlane_fsdp.facts import installed_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from weightlane.contexts import ExportContext, StreamContext
    from weightlane.manifest import RankManifest
    from weightlane.stream import ExportStream

SECONDS = 15.0
ERA = next(era for era in ERAS if isinstance(era.probe(installed_facts() or no_facts("fsdp")), Viable))
"""The one that fits the torch that runs this."""


@dataclass(frozen=True)
class _WithoutConfiguration:
    """The plugin, where the configuration that core asks of phase ADAPTER beside the tensors is left out."""

    def weightlane_describe_export(self, context: ExportContext) -> RankManifest:
        return replace(plugin.weightlane_describe_export(context), phase=Phase.FULL)

    def weightlane_export_params(self, context: StreamContext) -> ExportStream:
        return plugin.weightlane_export_params(context)


def lane_of(
    model: nn.Module,
    phase: Phase = Phase.FULL,
    *,
    bucket_bytes: int = 16 << 10,
    serving: tuple[int, ...] | None = None,
    check: Callable[[], None] = nothing_to_check,
    seconds: float = SECONDS,
    **options: Any,
) -> RankExport:
    wished = Wished(phase, bucket_bytes, serving, seconds, check, options)
    return export_of(_WithoutConfiguration(), ERA, model, wished)


def unsharded(model: nn.Module, phase: Phase = Phase.FULL, adapter: str | None = None) -> dict[str, Tensor]:
    """What every rank must be given, bit for bit; computed where the ranks compute."""
    model = model.to(DEVICE)
    held = {key: tensor.detach() for key, tensor in model.state_dict(keep_vars=True).items()}
    sources = {key: Source(key, tuple(item.shape), dtype_name(item.dtype)) for key, item in held.items()}
    with torch.no_grad():
        return {
            item.name: item.make([held[key] for key in item.sources]).clone()
            for item in recipes(model, sources, phase, adapter)
        }


def require_same(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(given) == list(expected), set(given) ^ set(expected)
    for name, tensor in expected.items():
        assert given[name].dtype == tensor.dtype, (name, given[name].dtype, tensor.dtype)
        assert given[name].shape == tensor.shape, (name, given[name].shape, tensor.shape)
        assert torch.equal(given[name].cpu(), tensor.cpu()), name
