"""What the program checks in each mode: what a synced engine holds and says, and what syncs leave behind."""

from __future__ import annotations

import contextlib
import traceback
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from proof_ground import Ground
from proof_models import (
    Folders,
    change,
    change_adapter,
    exported_tensors,
    kept_of,
    make_base,
    put_back,
    save_checkpoint,
    with_adapter,
)
from proof_words import WRONG
from run_spread import Said, differing, largest_difference

import weightlane as wl
from weightlane.buckets import slot_sizes
from weightlane.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from proof_words import Engine, Side

SYNCS = 10
SLACK = 2 << 20  # bytes; what other parts of the driver may round by


class Proof(Ground):
    """The modes, each in steps that every rank takes; rank 0 alone talks to the engines."""

    @abstractmethod
    def rollout(self, engine: Any) -> Any:
        """What a lane into this engine is given."""

    @abstractmethod
    def named(self, ref: Any) -> Any:
        """How a request names a lane's adapter."""

    @abstractmethod
    def slot(self, named: Any) -> Any:
        """How `hashes` is asked for what that adapter has in the engine."""

    @abstractmethod
    def from_folder(self, engine: Any, folder: Path) -> Any:
        """Has the engine itself read an adapter; how a request names that."""

    def connect(self, model: Any, engine: Any, mode: Any) -> Any:
        self.meet()
        return wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=self.rollout(engine),
            mode=mode,
            transport=self.options.transport,
            verify=self.options.verify,
        )

    def same_as_started(self, name: str, synced: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
        """Every live tensor and every LoRA slot's part, bit for bit."""
        for kind in ("live", "lora"):
            unlike = [differing(ours[kind], theirs[kind]) for ours, theirs in zip(synced, other, strict=True)]
            count = sum(len(ours[kind]) for ours in synced)
            if count:
                told = {"tensors": count, "differing": [item for found in unlike for item in found][:5]}
                self.check(f"{name}: {kind} tensors bitwise equal", not any(unlike), told)

    def same_words(self, name: str, synced: Engine, other: Engine) -> None:
        self.check(f"{name}: log-probs as a started engine's", *self.words.same(synced, other))

    def other_words(self, name: str, synced: Engine, other: Engine) -> None:
        """A control: engines with different weights are told apart."""
        same, told = self.words.same(synced, other)
        self.check(f"{name}: control, log-probs of the engine as trained are told apart", not same, told)

    def judged(
        self, sides: tuple[Side, Side], right: list[list[Said]], wrong: dict[str, list[list[Said]]]
    ) -> None:
        for name, passed, told in self.words.judged(sides, right, wrong):
            self.check(f"adapter: {name}", passed, told)

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

    def full(self, synced: Engine, trained: Engine, model: Any) -> None:
        untouched = self.said(synced)
        held = kept_of(model)
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
            self.same_words("full", synced, trained)
            self.meet()
            self.full_again(lane, synced, trained, model, held)

    def full_again(self, lane: Any, synced: Any, trained: Any, model: Any, held: Any) -> None:
        """Other weights for a while, then those of before."""
        self.ten_syncs("full", lane, model, change, 1)
        put_back(model, held)
        lane.sync(version=1000)
        self.meet()
        self.same_as_started("full, after twelve more", self.hashes(synced), self.hashes(trained))

    def merged(self, synced: Engine, trained: Engine, merged: Engine, wrapped: Any) -> None:
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
            self.same_words("merged", synced, merged)
            self.other_words("merged", synced, trained)
            self.meet()
            self.ten_syncs("merged", lane, wrapped, change_adapter, 2000)
            change_adapter(wrapped, 5)

    def adapter(self, synced: Engine, trained: Engine, wrapped: Any, folders: Folders) -> None:
        def ours() -> Side:
            return synced, self.named(lane.adapter_ref())

        here, there = (self.from_folder(engine, folders.adapter) for engine in (synced, trained))
        self.said(trained, there)  # it is in a slot now
        lane = self.connect(wrapped, synced, "adapter")
        with self.closing("adapter", lane):
            with self.timed("adapter: first sync, the base before it"):
                report = lane.sync(version=3000)
            self.figures["adapter"] = {
                "verified": str(report.replicas[0].verified),
                "phases": [str(phase) for phase in report.phases],
            }
            held = self.hashes(synced, self.slot(ours()[1]))
            self.same_as_started("adapter", held, self.hashes(trained, self.slot(there)))
            without = largest_difference(self.said(trained), self.said(*ours()))
            self.check("adapter: it moves log-probs", without > 1e-2, without)
            right = self.scored(ours(), (synced, here), (trained, there))
            wrong = {}
            for version, (word, spoil) in enumerate(WRONG.items(), 3001):
                self.meet()
                change_adapter(wrapped, 5)
                spoil(wrapped)
                lane.sync(version=version)
                wrong[word] = self.scored(ours(), (synced, here))
            self.meet()
            change_adapter(wrapped, 5)
            lane.sync(version=3010)
            self.judged((ours(), (trained, there)), right, wrong)
            self.meet()
            self.ten_syncs("adapter", lane, wrapped, change_adapter, 3000)

    def speed(self, synced: Engine, model: Any) -> None:
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
        kept = kept_of(model)
        if "full" in options.modes:
            self.attempt("full", self.full, synced, trained, model)
            put_back(model, kept)
            self.attempt("speed", self.speed, synced, model)
        wrapped = with_adapter(model, 5)
        wrapped.save_pretrained(folders.adapter)
        if "merged" in options.modes:
            save_checkpoint(folders.merged, model, exported_tensors(wrapped, Phase.MERGED))
            merged = self.engine("merged", folders.merged)
            self.attempt("merged", self.merged, synced, trained, merged, wrapped)
            change_adapter(wrapped, 5)
        if "adapter" in options.modes:
            self.attempt("adapter", self.adapter, synced, trained, wrapped, folders)
