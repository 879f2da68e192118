"""What the program checks: engines, the trainer's models, the three modes, and what has been seen so far."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from proof_models import (
    Folders,
    change,
    change_adapter,
    exported_tensors,
    make_base,
    save_checkpoint,
    with_adapter,
)
from run_spread import Said, differing, largest_difference, spread_of

import weightlane as wl
from weightlane.buckets import slot_sizes
from weightlane.front.client import FrontEndpoint
from weightlane.front.process import start_front_process
from weightlane.program import EngineCall
from weightlane.types import Phase

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
PROMPTS = [[(7 * row + 11 * column) % 500 + 1 for column in range(8)] for row in range(6)]
TOKENS = 12
RUNS = 12
SYNCS = 10
START_SECONDS = 400.0
SLACK = 2 << 20  # bytes; what other parts of the driver may round by


class Proof:
    """The engines, the trainer's models, and what has been seen so far."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options = options
        self.scratch = scratch
        self.figures: dict[str, Any] = {"checks": {}, "seconds": {}, "torch": torch.__version__}
        self.started = time.monotonic()
        self.ends = contextlib.ExitStack()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:7.1f} s] {text}", flush=True)

    def check(self, name: str, passed: bool, told: Any) -> None:
        self.figures["checks"][name] = {"passed": bool(passed), "told": told}
        self.say(f"{'pass' if passed else 'FAIL'}  {name}: {json.dumps(told)[:300]}")

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.figures["seconds"][name] = round(time.monotonic() - started, 3)
        self.say(f"{name}: {self.figures['seconds'][name]} s")

    def engine(self, name: str, model: Path) -> FrontEndpoint:
        """Starts one, and keeps it until the end."""
        address = f"unix:{self.scratch}/{name}.sock"
        python = self.options.engine_python
        words = [python, str(HERE / "probed_engine.py"), "--model", str(model), "--address", address]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        words += ["--tensor-parallel-size", str(self.options.tensor_parallel)]
        if self.options.device == "cpu":
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
            words += ["--dtype", "float32"]
        else:
            environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
            words += ["--dtype", "bfloat16", "--attention-backend", "TRITON_ATTN"]
            words += ["--gpu-memory-utilization", "0.2"]
        with self.timed(f"start of engine {name}"):
            self.ends.enter_context(
                start_front_process(
                    words,
                    address,
                    log=Path(self.options.out) / f"engine-{name}.log",
                    ready_timeout_seconds=START_SECONDS,
                    environment=environment,
                )
            )
        return FrontEndpoint(address, 300.0)

    def hashes(self, engine: FrontEndpoint, adapter: int = 0) -> list[dict[str, Any]]:
        route = f"hashes {json.dumps({'adapter': adapter})}"
        told: list[dict[str, Any]] = json.loads(engine.call(EngineCall(route, timeout_seconds=300.0)))
        return told

    def said(self, engine: FrontEndpoint, adapter: list[Any] | None = None) -> Said:
        asked = {"prompts": PROMPTS, "tokens": TOKENS, "adapter": adapter}
        answer = engine.call(EngineCall(f"generate {json.dumps(asked)}", timeout_seconds=300.0))
        return Said.of(json.loads(answer))

    def meet(self) -> None:
        """All ranks get here before any goes on: rank 0 alone talks to the engines, which takes long."""
        if self.options.tensor_parallel > 1:
            torch.distributed.barrier()

    def everywhere(self, value: int) -> list[int]:
        """The value of every rank."""
        if self.options.tensor_parallel == 1:
            return [value]
        values: list[int] = [0] * self.options.tensor_parallel
        torch.distributed.all_gather_object(values, value)
        return values

    def free_memory(self) -> int:
        if self.options.device == "cpu":
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def connect(self, model: Any, engine: FrontEndpoint, mode: Any) -> Any:
        self.meet()
        return wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=self.rollout(engine),
            mode=mode,
            transport=self.options.transport,
            verify=self.options.verify,
        )

    def rollout(self, engine: FrontEndpoint) -> Any:
        return [wl.rollout("vllm", url=engine.address)]

    def same_as_started(self, name: str, synced: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
        """Every live tensor and every LoRA slot's part, bit for bit."""
        for kind in ("live", "lora"):
            unlike = [differing(ours[kind], theirs[kind]) for ours, theirs in zip(synced, other, strict=True)]
            count = sum(len(ours[kind]) for ours in synced)
            if count:
                told = {"tensors": count, "differing": [item for found in unlike for item in found][:5]}
                self.check(f"{name}: {kind} tensors bitwise equal", not any(unlike), told)

    def same_words(
        self, name: str, synced: FrontEndpoint, other: FrontEndpoint, ours: Any, theirs: Any
    ) -> None:
        """Log-probs of the two engines differ by no more than repeated runs of either one do."""
        mine = [self.said(synced, ours) for _ in range(RUNS)]
        reference = [self.said(other, theirs) for _ in range(RUNS)]
        own = max(spread_of(mine), spread_of(reference))
        across = max(largest_difference(one, two) for one in mine for two in reference)
        told = {"own spread": own, "across": across, "runs": RUNS, "first tokens": mine[0].tokens[0][:6]}
        self.check(f"{name}: log-probs within the engine's own spread", across <= own, told)

    def ten_syncs(self, name: str, lane: Any, model: Any, move: Any, version: int) -> None:
        """Ten more syncs, each of other values; the GPU's free memory afterwards is what it was before."""
        for seed in (100, 101):
            move(model, seed)
            lane.sync(version=version + seed)
        before = self.everywhere(self.free_memory())
        times, loads, waits = [], [], []
        for number in range(SYNCS):
            move(model, 200 + number)
            report = lane.sync(version=version + 200 + number)
            times.append(round(report.seconds, 4))
            loads += [round(item.load_seconds, 4) for item in report.replicas[0].workers]
            waits += [round(item.wait_seconds, 4) for item in report.replicas[0].workers]
        after = self.everywhere(self.free_memory())
        told = {"before": before, "after": after, "bytes a sync": report.nbytes, "seconds": times}
        told |= {"load seconds": loads, "wait seconds": waits}
        unmoved = all(abs(ours - theirs) <= SLACK for ours, theirs in zip(before, after, strict=True))
        self.check(f"{name}: ten syncs leave GPU memory where it was", unmoved, told)

    # -- the three modes ------------------------------------------------------------------------------------

    def full(self, synced: FrontEndpoint, trained: FrontEndpoint, model: Any) -> None:
        untouched = self.said(synced)
        held = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        with self.timed("full: connect"):
            lane = self.connect(model, synced, "full")
        with self.closing("full", lane):
            self.figures["plan"] = str(lane.plan()).splitlines()[:12]
            transport = lane.plan().replicas[0].transport.value
            self.check("full: transport", transport == self.options.expected, transport)
            with self.timed("full: first sync"):
                report = lane.sync(version=1)
            self.figures["full"] = {"verified": str(report.replicas[0].verified), "bytes": report.nbytes}
            moved = largest_difference(untouched, self.said(synced))
            self.check("full: the sync moved log-probs", moved > 1e-2, moved)
            self.same_as_started("full", self.hashes(synced), self.hashes(trained))
            self.same_words("full", synced, trained, None, None)
            self.meet()
            self.ten_syncs("full", lane, model, change, 1)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(held[name])
            lane.sync(version=1000)
            self.meet()
            self.same_as_started("full, after twelve more", self.hashes(synced), self.hashes(trained))

    def merged(
        self, synced: FrontEndpoint, trained: FrontEndpoint, merged: FrontEndpoint, wrapped: Any
    ) -> None:
        lane = self.connect(wrapped, synced, "merged")
        with self.closing("merged", lane):
            with self.timed("merged: first sync"):
                report = lane.sync(version=2000)
            self.figures["merged"] = {"verified": str(report.replicas[0].verified), "bytes": report.nbytes}
            held = self.hashes(synced)
            self.same_as_started("merged", held, self.hashes(merged))
            others = [
                len(differing(ours["live"], theirs["live"]))
                for ours, theirs in zip(held, self.hashes(trained), strict=True)
            ]
            self.check("merged: control, the engine as trained holds other bits", all(others), others)
            self.same_words("merged", synced, merged, None, None)
            self.meet()
            self.ten_syncs("merged", lane, wrapped, change_adapter, 2000)
            change_adapter(wrapped, 5)

    def adapter(self, synced: FrontEndpoint, trained: FrontEndpoint, wrapped: Any, folders: Folders) -> None:
        from weightlane_vllm.lora_request import lora_number, lora_path

        from_folder = ["from-folder", 1, str(folders.adapter)]
        self.said(trained, from_folder)  # vLLM loads it now
        lane = self.connect(wrapped, synced, "adapter")
        with self.closing("adapter", lane):
            with self.timed("adapter: first sync, the base before it"):
                report = lane.sync(version=3000)
            self.figures["adapter"] = {
                "verified": str(report.replicas[0].verified),
                "phases": [str(phase) for phase in report.phases],
            }
            ref = lane.adapter_ref()
            number = lora_number(ref.name)
            self.same_as_started("adapter", self.hashes(synced, number), self.hashes(trained, 1))
            ours = [ref.name, number, lora_path(ref)]
            self.same_words("adapter", synced, trained, ours, from_folder)
            without = largest_difference(self.said(trained), self.said(synced, ours))
            self.check("adapter: it moves log-probs", without > 1e-2, without)
            self.meet()
            self.ten_syncs("adapter", lane, wrapped, change_adapter, 3000)

    def speed(self, synced: FrontEndpoint, model: Any) -> None:
        """Figures alone: full weights in large buckets, counted and not hashed."""
        self.meet()
        with wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=self.rollout(synced),
            transport=self.options.transport,
            verify="counts",
            read_back="never",
            bucket_bytes=512 << 20,
        ) as lane:
            reports = [lane.sync(version=4000 + number) for number in range(6)]
        self.figures["speed"] = {
            "bytes": reports[0].nbytes,
            "seconds": [round(report.seconds, 4) for report in reports],
            "load seconds": [
                [round(worker.load_seconds, 4) for worker in report.replicas[0].workers] for report in reports
            ],
        }
        self.say(f"speed: {self.figures['speed']}")

    @contextlib.contextmanager
    def closing(self, name: str, lane: Any) -> Iterator[None]:
        """Closes the lane; its slots' bytes are free again then."""
        with lane:
            yield
            slots = sum(slot_sizes(lane.plan().buckets))
            held = self.free_memory()
            self.meet()
        self.meet()
        freed = self.everywhere(self.free_memory() - held)
        told = {"slots": slots, "freed by closing": freed}
        expected = slots if self.options.expected == "cuda_ipc" else 0
        given_back = all(value >= expected - SLACK for value in freed)
        self.check(f"{name}: closing gives the slots back", given_back, told)

    def attempt(self, name: str, step: Callable[..., None], *given: Any) -> None:
        """A step that fails is told, and the next ones are still tried."""
        try:
            step(*given)
        except Exception:  # noqa: BLE001 - whatever it is, figures of the others are wanted
            self.figures.setdefault("errors", {})[name] = traceback.format_exc()
            self.say(f"FAIL  {name}:\n{traceback.format_exc()}")

    def run(self) -> None:
        """All of it, in an order in which each engine is started once."""
        options = self.options
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        root = self.scratch
        folders = Folders(root / "first", root / "trained", root / "merged", root / "adapter")
        with self.timed("models"):
            device = f"cuda:{options.rank}" if options.device == "cuda" else options.device
            model = make_base(options.size, device=device, dtype=dtype)
            save_checkpoint(folders.first, model, exported_tensors(model, Phase.FULL))
            change(model, 1)
            save_checkpoint(folders.trained, model, exported_tensors(model, Phase.FULL))
        synced = self.engine("synced", folders.first)
        trained = self.engine("trained", folders.trained)
        kept = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.attempt("full", self.full, synced, trained, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        self.attempt("speed", self.speed, synced, model)
        wrapped = with_adapter(model, 5)
        wrapped.save_pretrained(folders.adapter)
        save_checkpoint(folders.merged, model, exported_tensors(wrapped, Phase.MERGED))
        merged = self.engine("merged", folders.merged)
        self.attempt("merged", self.merged, synced, trained, merged, wrapped)
        change_adapter(wrapped, 5)
        self.attempt("adapter", self.adapter, synced, trained, wrapped, folders)
