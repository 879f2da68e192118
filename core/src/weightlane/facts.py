"""Facts: a serialisable picture of one engine as it is.

Probes read facts and nothing else, so both answers of every probe can be tested without an engine and
the evidence can be shown later, on another machine.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

FactsSource: TypeAlias = Literal["worker", "server", "installed", "assumed"]
"""Where facts came from, best first: the live worker, the live server's own description, the installed
package read without importing it, or the user's word (`WEIGHTLANE_ASSUME_<ENGINE>_VERSION`)."""

SOURCE_QUALITY: dict[FactsSource, int] = {"worker": 3, "server": 2, "installed": 1, "assumed": 0}


class ParallelSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the engine's process grid."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1


class EngineFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine as it is.

    `attributes` maps a dotted question such as `vllm.lora.layers:BaseLayerWithLoRA.load_weights` to whether
    it is defined there; a question nobody asked is absent, which is not the same as False.
    `request_fields` maps a request type to its field names; `routes` lists the HTTP paths served.
    """

    engine: str
    version: str
    source: FactsSource
    attributes: dict[str, bool] = {}
    request_fields: dict[str, tuple[str, ...]] = {}
    routes: tuple[str, ...] = ()
    launch_arguments: dict[str, str] = {}
    parallel: ParallelSizes = ParallelSizes()
    model_path: str = ""
    device: str = ""
    quantization: str = ""


def is_word_alone(facts: EngineFacts) -> bool:
    """Whether all that is known is a version that the user stated: no engine was seen, live or installed."""
    return facts.source == "assumed" and bool(facts.version)


def no_facts(engine: str) -> EngineFacts:
    """Facts of an engine nobody could reach and that is not installed."""
    return EngineFacts(engine=engine, version="", source="assumed")
