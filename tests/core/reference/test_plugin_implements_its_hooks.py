from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from weightlane.contexts import (
    AgentContext,
    BuildRequestsContext,
    EndpointContext,
    FactsContext,
    LaunchContext,
    MapNamesContext,
    RolloutTarget,
)
from weightlane.endpoint import EngineEndpoint
from weightlane.errors import EngineError, PlanError
from weightlane.facts import EngineFacts
from weightlane.front.client import FrontEndpoint
from weightlane.manifest import Manifest, TensorSpec
from weightlane.program import AgentMove
from weightlane.receiver import ExpectedTensor, LiveTensor, WorkerDescription
from weightlane.reference import plugin
from weightlane.reference.engine import ReferenceEngine
from weightlane.types import Mode, Phase, TransportName

(DESCRIPTOR,) = plugin.weightlane_register_backends()
FACTS = EngineFacts(engine="reference", version="5.0", source="worker")


def target(**fields: object) -> RolloutTarget:
    return RolloutTarget("reference", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "fits"), [("4.49.0", False), ("4.50.0", True), ("5.24.0", True), ("6.0", False)]
)
def test_versions(version: str, fits: bool) -> None:
    assert DESCRIPTOR.versions.contains(version, prereleases=True) is fits


def test_the_plugin_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, weightlane.reference.plugin as p; p.weightlane_register_backends();"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_facts_of_what_is_installed_and_of_nothing() -> None:
    facts = plugin.weightlane_collect_facts(FactsContext("reference", ("transformers",)))
    assert facts is not None
    assert (facts.version, facts.source) == (metadata.version("transformers"), "installed")
    assert plugin.weightlane_collect_facts(FactsContext("reference", ("no-such-distribution",))) is None
    assert plugin.weightlane_collect_facts(FactsContext("vllm", ("transformers",))) is None


def test_an_engine_of_this_process_gives_facts_endpoint_and_worker(untied_folder: str) -> None:
    engine = ReferenceEngine(untied_folder)
    facts = plugin.weightlane_collect_facts(
        FactsContext("reference", ("transformers",), target(handle=engine))
    )
    assert facts is not None
    assert (facts.source, facts.model_path) == ("worker", untied_folder)
    endpoint = plugin.weightlane_open_endpoint(EndpointContext(DESCRIPTOR, target(handle=engine), 5.0))
    assert isinstance(endpoint, EngineEndpoint)
    assert endpoint.facts() == facts
    assert endpoint.describe_workers("reference")[0].incarnation == engine.worker.describe().incarnation
    assert len(endpoint.generate([[1, 2]], max_tokens=3)[0].token_ids) == 3
    assert plugin.weightlane_worker_agent(AgentContext(DESCRIPTOR, engine)) is engine.worker


def test_a_foreign_handle_is_named_and_an_address_gives_a_front_endpoint() -> None:
    with pytest.raises(EngineError, match=r"builtins\.list is not a reference engine"):
        plugin.weightlane_open_endpoint(EndpointContext(DESCRIPTOR, target(handle=[]), 5.0))
    endpoint = plugin.weightlane_open_endpoint(EndpointContext(DESCRIPTOR, target(address="unix:/x/y"), 5.0))
    assert isinstance(endpoint, FrontEndpoint)
    with pytest.raises(EngineError, match="starts with 'http'"):
        plugin.weightlane_open_endpoint(EndpointContext(DESCRIPTOR, target(address="http://x"), 5.0))


def test_names_are_exact_or_tied_or_unknown_and_travel_in_the_receivers_dtype() -> None:
    specs = [TensorSpec(name, (2,), "float32") for name in ("embed", "head", "stray")]
    worker = WorkerDescription(
        worker=0,
        workers=1,
        host="here",
        process_id=1,
        incarnation="a",
        live=(LiveTensor("embed", (2,), "bfloat16"), LiveTensor("head", (2,), "bfloat16")),
        expected=(
            ExpectedTensor("embed", (2,), "bfloat16"),
            ExpectedTensor("head", (2,), "bfloat16", tied_to="embed"),
        ),
    )
    manifest = Manifest(Phase.FULL, 1, tuple(specs))
    embed, head, stray = plugin.weightlane_map_names(MapNamesContext(DESCRIPTOR, FACTS, manifest, worker))
    assert (embed.rule, embed.targets, embed.dtype, embed.dropped) == ("exact", ("embed",), "bfloat16", "")
    assert (head.rule, head.targets, head.dropped) == ("tied", (), "tied to embed")
    assert (stray.rule, stray.targets, stray.dropped) == ("unknown", (), "")


@pytest.mark.parametrize("transport", DESCRIPTOR.transports)
def test_the_agent_receives_over_every_declared_transport(transport: TransportName) -> None:
    context = BuildRequestsContext(DESCRIPTOR, FACTS, Phase.FULL, transport, (), (), (), "digest")
    program = plugin.weightlane_build_requests(context)
    assert program.move == AgentMove(transport.value)
    assert plugin.weightlane_plan_lifecycle(context).pause == ()


def test_launch_refuses_tensor_parallel() -> None:
    plan = plugin.weightlane_plan_launch(LaunchContext(DESCRIPTOR, FACTS, Mode.FULL, "/models/m"))
    assert plan.arguments[:4] == ("-m", "weightlane.reference.server", "--model", "/models/m")
    assert plan.arguments[4:6] == ("--address", plan.address)
    with pytest.raises(PlanError, match="address"):
        plugin.weightlane_plan_launch(LaunchContext(DESCRIPTOR, FACTS, Mode.FULL, "/m", address="http://x:1"))
    with pytest.raises(PlanError, match="one worker, and 2 were asked for"):
        plugin.weightlane_plan_launch(LaunchContext(DESCRIPTOR, FACTS, Mode.FULL, "/models/m", 2))
