"""One or more samples of every message of core, each with the type that its reader expects.

Kept complete by `test_no_message_is_forgotten.py`: every type, and every field, is in some sample.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from weightlane import lane_messages as lm
from weightlane import messages as m
from weightlane.adapters import (
    AdapterBinding,
    AdapterExpression,
    AdapterPlan,
    AdapterRef,
    BoundModule,
    TrainedBase,
)
from weightlane.buckets import lay_out_buckets
from weightlane.control import RankPlace
from weightlane.demo import messages as dm
from weightlane.demo.settings import Lesson
from weightlane.device_memory import HANDLE_BYTES, DeviceMemoryHandle
from weightlane.facts import EngineFacts, ParallelSizes
from weightlane.failures import Failure
from weightlane.lane_owner import LaneOwner
from weightlane.manifest import Manifest, RankManifest, TensorSpec, TrainedAdapter
from weightlane.peft import AdapterConfig, ModuleLora
from weightlane.plan import LanePlan, ReplicaPlan
from weightlane.program import (
    AdapterMove,
    AgentMove,
    AnnouncedGroup,
    EngineCall,
    MemoryCalls,
    Program,
    RequestMove,
    TrainerLifecycle,
)
from weightlane.receiver import (
    BeyondExpected,
    ExpectedTensor,
    LiveTensor,
    NameEntry,
    NameRules,
    WorkerDescription,
)
from weightlane.residency import WorkerResidency
from weightlane.trace.figures import TraceFigures
from weightlane.trace.table import (
    Fill,
    Obstacle,
    Placement,
    PlacementTable,
    TableKey,
    TracedSource,
    TracedTarget,
    Untraced,
)
from weightlane.types import Mode, Phase, TransportName

Expected: TypeAlias = "tuple[msgspec.Struct, Any]"
"""A message, and the type or union that whoever it is sent to decodes it as."""

WIRES = (m.WireTensor("a", (2, 3), "bfloat16"), m.WireTensor("b", (), "float32"))
BUCKETS = lay_out_buckets(WIRES)
DEVICE_MEMORY = DeviceMemoryHandle("GPU-1", bytes(HANDLE_BYTES), 64)
PLAN = m.ReceivePlan(
    *("lane-1", "d1", "acme", "cuda_ipc", WIRES, BUCKETS),
    ring={0: "/x", 3: "/y"},
    memory={0: DEVICE_MEMORY, 3: DEVICE_MEMORY},
)
CONFIG = AdapterConfig(
    *("policy", 2, 4.0, ("layers.0.q", "layers.0.v")),
    own={"layers.0.v": ModuleLora(1, 3.0, 4)},
    features={"use_dora": "True"},
)
EXPRESSION = AdapterExpression(
    *("paused", '{"r": 2}'), notes=("as it is",), carries=("use_dora",), form="normal", groups=(("q", "v"),)
)
VALUES = {"layers.0.q.weight": "0123456789abcdef"}
BASE = TrainedBase("fedcba9876543210", VALUES, "lane-2.base", "")
ADAPTER = AdapterPlan(CONFIG, EXPRESSION, BASE)
BASE_PLAN = m.ReceivePlan(
    *("lane-2.base", "d3", "acme", "shm", WIRES, BUCKETS),
    phase=Phase.BASE,
    base=TrainedBase("fedcba9876543210", not_sent="backend acme cannot receive phase base"),
)
ADAPTER_PLAN = m.ReceivePlan(
    *("lane-2", "d2", "acme", "disk", WIRES, BUCKETS),
    verify="counts",
    folder="/lanes/lane-2",
    phase=Phase.ADAPTER,
    adapter=ADAPTER,
    owner=LaneOwner("boot-1", "pid:[4026531836]", 7, 1234),
    canonical={"a.base_layer": "a"},
    tables={1: "0123456789abcdef"},
    read_back="always",
)
BINDING = AdapterBinding(AdapterRef("policy@4", 4), (BoundModule("layers.0.q", 2, 2.0),))
UNREAD = AdapterBinding(AdapterRef("policy@4", 4), (), "nobody of ours is in its process")
FACTS = EngineFacts(
    "acme",
    "1",
    "worker",
    attributes={"acme.lora:Layer.load_weights": True},
    request_fields={"Generate": ("prompt",)},
    routes=("/generate",),
    launch_arguments={"--lora": "yes"},
    parallel=ParallelSizes(2, 3, 4),
    model_path="/model",
    device="cpu",
    quantization="fp8",
)
DESCRIPTION = WorkerDescription(
    worker=1,
    workers=2,
    host="h",
    process_id=7,
    incarnation="i",
    device="cuda:0",
    gpu_uuid="GPU-1",
    held_version=3,
    servable=False,
    live=(LiveTensor("x", (1,), "int8", "buffer"),),
    expected=(ExpectedTensor("y", (2, 0), "int8", tied_to="z"),),
    packed={"qkv_proj": ("q_proj", "k_proj")},
    renames={"model.": "language_model."},
    rules=NameRules(
        patterns={"^visual": None},
        substrings={".block.": ".layer."},
        stacked={"q_proj": "qkv_proj"},
        suffixes={"gamma": "weight"},
        wrapper_loads=False,
        expert_prefix="base_layer.",
    ),
    beyond=BeyondExpected("a drafter", "draft.", "Export it."),
    facts=FACTS,
)
TABLE = PlacementTable(
    TableKey("acme", "1", "AcmeForCausalLM", 1, 12, 2, 3, 2, lora=True),
    "base_layer",
    (TracedSource("a", "a.base_layer", (2, 3), "bfloat16"), TracedSource("b", "b", (), "float32")),
    (
        TracedTarget("w.a", (4, 3), (3, 1), "float32", "parameter", 0, aliases=("v.a",)),
        TracedTarget("w.b", (), (), "float32", "buffer", 0, 12, owned="it is made", form="checkpoint"),
    ),
    (Placement(0, 0, 0, 3, ((6, 1, 1),), ("float16", "float32")), Placement(1, 1, 0, 0, ())),
    (Fill(0, 9, ((3, 1),), 0.5),),
    (Obstacle("computed", "aten.exp", ("a",), ("w.a",), "it is negated"),),
    0.25,
)
REPORT = m.ReceiveReport(1, 3, 4, 2, 16, 2, "0123", 0.5, 0.25)
BOUND = msgspec.structs.replace(REPORT, adapter=BINDING, read_back=m.ReadBack(12, 3))
BELIEVED = msgspec.structs.replace(REPORT, adapter=UNREAD)
FAILURE = Failure(
    "PlanError", "what", "why", "fix", "here", "at line 1", (("shape", "a", "b", "c", ("d",)),), "lane-1"
)
SPECS = (TensorSpec("a", (2, 3), "bfloat16", (0,)), TensorSpec("b", (), "float32", (0, 1)))
PLACE = RankPlace(0, "host", 7)
PAUSE = EngineCall("pause", '{"mode": "abort"}', "weight_version", 5.0)


def _replica(number: int, **fields: Any) -> ReplicaPlan:
    return ReplicaPlan(
        **{
            "replica": number,
            "engine": "acme",
            "engine_version": "1.0",
            "address": "unix:/x",
            "reads_back": bool(number),
            "backend": "acme",
            "era": "one",
            "distribution": "acme-weightlane",
            "evidence": ("it has it",),
            "notes": (),
            "coverage": "proven",
            "transport": TransportName.SHM,
            "incarnations": {0: "first"},
            "peers": (0,),
            "gpus": ("GPU-1",),
            "program": Program(AgentMove("shm"), pause=(PAUSE,)),
            "coverage_reason": "a snapshot says so",
            "trace": TraceFigures(("0123",), "plain", 3, 12, 4, 1, 0.5),
        }
        | fields
    )


REQUESTS_PROGRAM = Program(
    RequestMove(
        *("/update", "payload", 2, "{}", '{"flush_cache": true}', 9.0),
        transport="collective",
        group=AnnouncedGroup("gloo", 2),
    ),
    pause=(PAUSE,),
    settle=(PAUSE,),
    publish=(PAUSE,),
    resume=(PAUSE,),
    notes=("the fence is advisory",),
    memory=(MemoryCalls("weights", PAUSE, PAUSE, contents="kept"),),
    requests="abort",
)
MANIFEST = Manifest(
    *(Phase.ADAPTER, 1, SPECS),
    aliases={"c": "a"},
    collective=True,
    adapter=CONFIG,
    base=VALUES,
    trained=TrainedAdapter(CONFIG, SPECS),
    group_backend="nccl",
    groups=((0,),),
)
LANE_PLAN = LanePlan(
    lane="lane-2",
    mode=Mode.ADAPTER,
    phase=Phase.ADAPTER,
    world_size=1,
    trainer_backend="torch",
    manifest=MANIFEST,
    verify="digest",
    entries=(NameEntry("a", "a", "bfloat16", ("w.a",), "exact"), NameEntry("c", "", "int8", dropped="tied")),
    tensors=WIRES,
    buckets=BUCKETS,
    replicas=(
        _replica(0, adapter=EXPRESSION, stamps_version=True),
        _replica(1, program=REQUESTS_PROGRAM),
        _replica(2, program=Program(AdapterMove("/load", "tensors", 2, "{}", 9.0))),
    ),
    folder="/lanes",
    missing_replicas="skip",
    release=("kv_cache",),
    trainer_lifecycle=TrainerLifecycle("weights to the GPU", "weights to the CPU", ("slow",)),
    read_back="never",
    trained_on=BASE,
)
LANE_PLAN = msgspec.structs.replace(LANE_PLAN, base=msgspec.structs.replace(LANE_PLAN, phase=Phase.BASE))
JOINED = lm.Joined(
    PLACE,
    RankManifest(
        rank=0,
        world_size=1,
        phase=Phase.ADAPTER,
        tensors=SPECS,
        replicated=False,
        collective=True,
        aliases={"c": "a"},
        host="h",
        device="cuda:0",
        gpu_uuid="GPU-1",
        adapter=CONFIG,
        base=VALUES,
        group_backend="nccl",
        groups=((0,),),
    ),
    {"mode": "full"},
)
MISSING = lm.MissingReplica(2, "unix:/y", "it does not answer")
SYNCED = lm.SyncReport(
    *("lane-1", 1, 2, 3, 4, 5, 0.5, "d", 1),
    replicas=(lm.ReplicaReport(0, "x", "all", (REPORT, BOUND, BELIEVED), (m.ReadBack(9, 1),)),),
    missing=(MISSING,),
    rejoined=(1,),
    phases=(lm.PhaseReport(Phase.BASE, (0,), 4, 64, 0.5, ("counts equal",), ("it was started anew",)),),
    update_lost=0.02,
)
AGENT_REQUESTS: tuple[m.AgentRequest, ...] = (
    m.Describe("acme"),
    m.GetResidency("acme", "lane-1"),
    m.Trace("acme", WIRES),
    m.Attach(PLAN),
    m.Attach(ADAPTER_PLAN),
    m.Attach(BASE_PLAN),
    m.Receive("lane-1", "d1", 3, 4, {0: "i", 1: "j"}, 5.0, 6.5),
    m.Receive("lane-1", "d1", 3, 4, {0: "i"}, 5.0, 6.5, generation="goes-on"),
    m.BeginInline("lane-1", "d1", 3, 4, {0: "i"}),
    m.BeginInline("lane-1", "d1", 3, 4, {0: "i"}, generation="goes-on"),
    m.LoadInline("lane-1", 3, 0, b"\x00\xff"),
    m.FinishInline("lane-1", 3),
    m.Publish("lane-1", 3, 4),
    m.Cancel("lane-1", 3, "because"),
    m.Detach("lane-1"),
    m.CheckResidency("lane-1", "d1", {0: "i"}),
    m.ReceiveDisk("lane-1", "d1", 3, 4, {0: "i"}, "sync-3-version-4", "0123"),
    m.ReceiveDisk("lane-1", "d1", 3, 4, {0: "i"}, "sync-3-version-4", "0123", generation="goes-on"),
)
AGENT_REPLIES: tuple[m.AgentReply, ...] = (
    m.Described(DESCRIPTION),
    WorkerResidency(1, "i", "d1", 4, servable=False, cause="it sleeps", released=("weights",), base="0"),
    m.Traced(TABLE),
    Untraced("it has no loader"),
    m.Done(1),
    REPORT,
    BOUND,
    Failure("SyncError", "what"),
    FAILURE,
)
FRONT_REQUESTS: tuple[m.FrontRequest, ...] = (
    m.GetFacts(),
    m.CallWorkers(b"x", 1.0),
    m.CallEngine("pause"),
    m.CallEngine("pause", 5.0),
    m.Generate(((1, 2), ()), 4),
    m.Generate(((1, 2),), 4, 0.5, 7, "policy@4"),
    m.Shutdown(),
)
FRONT_REPLIES: tuple[m.FrontReply, ...] = (
    m.Facts(FACTS),
    m.WorkerReplies((b"x", b"")),
    m.Generations((m.Generation((1, 2), (-0.5, 0.0), 3),)),
    m.EngineAnswer("paused"),
    FAILURE,
)
LANE: tuple[msgspec.Struct, ...] = (
    JOINED,
    lm.Planned(LANE_PLAN, (PLACE,)),
    lm.Ready((lm.RingPlace(0, 1, "/x"), lm.RingPlace(0, 2, "/y", DEVICE_MEMORY))),
    lm.Go(),
    lm.SyncStart(3, "d1", (0, 2)),
    lm.SyncGo((lm.Rejoining(1, {0: "second"}),), (MISSING,), (lm.NeedsBase(0, "it holds another base"),)),
    lm.RankMoved(0, 1, 2, "d", 0.5),
    lm.RankMoved(1, 1, 2, "d", 0.5, update_lost=0.25),
    SYNCED,
    lm.Committed(4),
)
"""What ranks put under keys of the control channel, each read as itself or as a Failure."""

DEMO: tuple[dm.RankMessage, ...] = (
    dm.ModelReady(),
    dm.Connected("plan", "LlamaForCausalLM", 7),
    dm.StepReport(1, 2, (2, None), 0.5, 16, 0.1, 0.2, None, 0.5, 0.25),
    dm.StepReport(1, 2, (2,), 0.5, 16, 0.1, 0.2, 1.0, 0.5, 0.25, 4096, 0.125, 1, "everything", 0.02),
    dm.LastProbs((0.5, 0.25), (0.5,)),
    dm.Closing(4, (3,), 1, 0, 0.0, 0.1, True),
    dm.Broken(FAILURE),
)
TASK = dm.Task("torch", "reference", "full", "/model", "unix:/x", 3, True, Lesson(0.01, 8, 5, 6, 7))

EVERY: list[Expected] = [
    *((message, m.AgentRequest) for message in AGENT_REQUESTS),
    *((message, m.AgentReply) for message in AGENT_REPLIES),
    *((message, m.FrontRequest) for message in FRONT_REQUESTS),
    *((message, m.FrontReply) for message in FRONT_REPLIES),
    *((message, type(message) | Failure) for message in LANE),
]
"""Every message that travels as msgpack."""
