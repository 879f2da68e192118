"""What the plugin would send to one SGLang version, byte for byte, from the facts of its sources."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from weightlane.adapter_engine import AdapterLoad
from weightlane.adapters import AdapterRef
from weightlane.contexts import BuildRequestsContext, RolloutTarget
from weightlane.facts import EngineFacts, ParallelSizes
from weightlane.peft import ModuleLora, lora_name
from weightlane.peft.config import adapter_of_modules
from weightlane.probes import Viable
from weightlane.program import with_lifecycle
from weightlane.types import BackendDescriptor, Capability, Phase, TransportName
from weightlane_sglang import contract, plugin
from weightlane_sglang.adapter_contract import LOAD_REQUEST, LOAD_ROUTE, UNLOAD_REQUEST, UNLOAD_ROUTE
from weightlane_sglang.adapter_expression import config_json
from weightlane_sglang.endpoint import SglangEndpoint
from weightlane_sglang.generation import generate_body
from weightlane_sglang.installed import installed_facts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest

RANKS = 2
CLASSES = {
    contract.UPDATE_ROUTE: contract.UPDATE_REQUEST,
    contract.PAUSE_ROUTE: contract.PAUSE_REQUEST,
    contract.VERSION_ROUTE: contract.VERSION_REQUEST,
    contract.BEGIN_UPDATE_ROUTE: contract.BEGIN_REQUEST,
    contract.RELEASE_ROUTE: contract.RELEASE_REQUEST,
    contract.RESUME_ROUTE: contract.RESUME_REQUEST,
    contract.GENERATE_ROUTE: "GenerateReqInput",
    LOAD_ROUTE: LOAD_REQUEST,
    UNLOAD_ROUTE: UNLOAD_REQUEST,
}
WEIGHTS = {
    "model.norm.weight": torch.arange(6.0, dtype=torch.bfloat16),
    "model.layers.0.mlp.down_proj.weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),
    "model.layers.0.mlp.up_proj.weight": torch.arange(40.0).view(8, 5)[:, :3],  # a view of a larger storage
    "model.layers.0.self_attn.q_proj.weight": torch.nn.Parameter(torch.ones(3, 2)),
}
MODULES = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
ADAPTER = adapter_of_modules("default", {name: ModuleLora(2, 8.0) for name in MODULES})
MATRICES = {
    lora_name(name, side): torch.full((2, 6) if side == "A" else (4, 2), float(number))
    for number, name in enumerate(MODULES)
    for side in "AB"
}


def facts_of(folder: Path) -> EngineFacts:
    """Of the version in this folder, as of a server with two ranks."""
    found = installed_facts(("sglang",), (str(folder),))
    assert found is not None, f"{folder} holds no sglang"
    return msgspec.structs.replace(found, parallel=ParallelSizes(tensor=RANKS))


def era_of(facts: EngineFacts) -> BackendDescriptor:
    """The one era whose probe and whose range both take this version."""
    eras = [
        item
        for item in plugin.weightlane_register_backends()
        if isinstance(item.probe(facts), Viable) and item.versions.contains(facts.version, prereleases=True)
    ]
    (only,) = eras
    return only


def takes_adapters(descriptor: BackendDescriptor) -> bool:
    return Capability.RECEIVE_ADAPTER in descriptor.capabilities


def sent_requests(
    descriptor: BackendDescriptor, facts: EngineFacts, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, str]]:
    """(request class, body) of a whole sync, of memory that goes and comes back, and of an adapter's load."""
    recorded: list[tuple[str, bytes]] = []

    def record(_: Any, method: str, route: str, *, body: Iterable[bytes] = (), **bounds: Any) -> bytes:
        recorded.append((route.partition("?")[0], b"".join(body)))
        return b"{}"

    monkeypatch.setattr("weightlane_sglang.http_channel.HttpChannel.send", record)
    context = BuildRequestsContext(
        descriptor, facts, Phase.FULL, TransportName.INLINE, (), (), (), "counts",
        release=("weights", "kv_cache"),
    )  # fmt: skip
    endpoint = SglangEndpoint(RolloutTarget("sglang", address="http://127.0.0.1:1"), timeout_seconds=5)
    program = with_lifecycle(
        plugin.weightlane_build_requests(context), plugin.weightlane_plan_lifecycle(context)
    )
    for call in program.pause:
        endpoint.call(call)
    endpoint.send_bucket(program.move, list(WEIGHTS.items()), last=True, version=7)
    for call in (*program.settle, *program.publish, *program.resume):
        endpoint.call(call, version=7)
    for item in program.memory:
        recorded += [(call.route, call.body.encode()) for call in (item.release, item.resume)]
    asked = generate_body([[1, 2, 3]], max_tokens=4, temperature=1.0, seed=3, adapter="default@7")
    recorded.append((contract.GENERATE_ROUTE, asked))
    if takes_adapters(descriptor):
        move = plugin.weightlane_build_requests(replace(context, phase=Phase.ADAPTER, swap="two_slot")).move
        load = AdapterLoad("slot", AdapterRef("default@7", 7), ADAPTER, config_json(ADAPTER), MATRICES)
        endpoint._adapters._send(move, load)
        endpoint._adapters._unload("default@6", 5)
    endpoint.close()
    return [
        (CLASSES[route], (body or b"{}").decode())
        for route, body in recorded
        if CLASSES.get(route) in facts.request_fields or route == contract.GENERATE_ROUTE
    ]
