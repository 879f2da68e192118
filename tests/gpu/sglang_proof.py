"""The proof over SGLang: servers that start together, lanes by requests, and what SGLang has of its own."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import time
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from probed_servers import SAVER, Servers
from proof import SLACK, SYNCS, Proof
from proof_models import (
    RANK,
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
from proof_words import GREEDY_RUNS, Words
from run_spread import differing
from told_apart import compare

import weightlane as wl
from weightlane.errors import NotServableError
from weightlane.types import Phase
from weightlane_sglang.adapter_launch import lora_arguments
from weightlane_sglang.contract import PAYLOAD_FIELD, UPDATE_ROUTE
from weightlane_sglang.payload import EncodedBucket
from weightlane_sglang.run_folder import RUN_FOLDER_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from probed_server import ProbedServer

MODES = ("full", "adapter", "merged", "own", "memory", "speed")
"""In the order of their weight, which is that of a run that may be cut short."""
_PLACES = "4"  # in the LoRA pool: the lane's two, one for no adapter, and one that SGLang reads itself
_FOR = {
    "synced": ("full", "merged", "own"),
    "trained": ("full", "merged", "own"),
    "merged": ("merged",),
    "adapted": ("adapter",),
    "adapted_started": ("adapter",),
    "sleeper": ("memory",),
}
"""Servers, and the modes that need them."""
_LEAST = 15.0  # seconds; with less left a mode is not begun
_GIVEN_UP = 1.5  # a sync is not begun where less time is left than this many of the last one


class SglangProof(Proof):
    """An adapter is a name. Ten syncs are made within a mode for adapters alone: full weights take longer."""

    title = "SGLang"

    def run(self) -> None:
        """Servers start as soon as their checkpoints are there, all before the first is waited for."""
        options = self.options
        self.figures["not shown"] = {}
        os.environ.setdefault(RUN_FOLDER_VARIABLE, str(self.scratch / "run"))
        if options.device == "cpu":  # where it takes long, and every run says the same
            self.words = Words(options.kernels, self.title, runs=GREEDY_RUNS)
        self.servers = Servers(options, self.scratch)
        self.ends.callback(self.servers.close)
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        self.model = make_base(options.size, device=options.device, dtype=dtype)
        self.folders = Folders(*(self.scratch / name for name in ("first", "trained", "merged", "adapter")))
        with self.timed("models"):
            self._checkpoints()
        self.trained = kept_of(self.model)
        for mode in options.modes:
            if self.seconds_left() < _LEAST:
                self.not_shown(mode, f"{self.seconds_left():.0f} of {options.seconds} s were left")
                continue
            self.attempt(mode, getattr(self, f"show_{mode}"))
            put_back(self.model, self.trained)
            change_adapter(self.wrapped, 5)

    def _checkpoints(self) -> None:
        lora = lora_arguments(RANK, "two_slot", device=self.options.device)
        lora = (*lora, "--max-loras-per-batch", _PLACES)
        save_checkpoint(self.folders.first, self.model, exported_tensors(self.model, Phase.FULL))
        self._begin(self.folders.first, synced=(), adapted=lora)
        change(self.model, 1)
        save_checkpoint(self.folders.trained, self.model, exported_tensors(self.model, Phase.FULL))
        self._begin(self.folders.trained, trained=(), adapted_started=lora)
        self.wrapped = with_adapter(copy.deepcopy(self.model), 5)
        self.wrapped.save_pretrained(self.folders.adapter)
        save_checkpoint(self.folders.merged, self.model, exported_tensors(self.wrapped, Phase.MERGED))
        self._begin(self.folders.merged, merged=())
        saver = (SAVER,) if self.options.device == "cuda" else ()
        self._begin(self.folders.first, sleeper=saver)

    def _begin(self, model: Path, **servers: tuple[str, ...]) -> None:
        for name, arguments in servers.items():
            if any(mode in self.options.modes for mode in _FOR[name]):
                self.servers.begin(name, model, *arguments)

    def engine(self, name: str, model: Any = None, *more: str) -> ProbedServer:
        """One that was begun in `run`."""
        del model, more
        started = self.servers.ready(name)
        if name not in self.figures.setdefault("servers", {}):
            facts = started.server.facts
            told = {"version": facts.version, "lora": facts.launch_arguments.get("enable_lora")}
            told |= {"memory saver": facts.launch_arguments.get("enable_memory_saver")}
            told |= {"start seconds": started.start_seconds, "first seconds": started.first_seconds}
            self.figures["servers"][name] = told
            self.keep()
            self.say(f"server {name}: {told}")
        return started.server

    def rollout(self, engine: ProbedServer) -> Any:
        return [wl.rollout("sglang", url=engine.address)]

    def named(self, ref: Any) -> str:
        return str(ref.name)

    def slot(self, named: str) -> str:
        return named

    def from_folder(self, engine: ProbedServer, folder: Path) -> str:
        engine.read_adapter("from-folder", folder)
        return "from-folder"

    # -- the modes ------------------------------------------------------------------------------------------

    def show_full(self) -> None:
        self.full(self.engine("synced"), self.engine("trained"), self.model)

    def show_adapter(self) -> None:
        adapted, started = self.engine("adapted"), self.engine("adapted_started")
        self.adapter(adapted, started, self.wrapped, self.folders)

    def show_merged(self) -> None:
        self.merged(self.engine("synced"), self.engine("trained"), self.engine("merged"), self.wrapped)

    def full_again(self, lane: Any, synced: Any, trained: Any, model: Any, held: Any) -> None:
        """Later, by `show_speed`."""

    def ten_syncs(self, name: str, lane: Any, model: Any, move: Any, version: int) -> None:
        if name == "adapter":
            self.servers.settle()
            super().ten_syncs(name, lane, model, move, version)

    @contextlib.contextmanager
    def closing(self, name: str, lane: Any) -> Iterator[None]:
        """A lane by requests has no slots on the GPU to give back."""
        del name
        with lane:
            yield

    # -- memory ---------------------------------------------------------------------------------------------

    def show_memory(self) -> None:
        """A release frees what the weights take, nothing is said meanwhile, and a sync brings it all back."""
        try:
            sleeper = self.engine("sleeper")
        except Exception as error:  # noqa: BLE001 - whatever kept it from starting is what there is to tell
            self.not_shown("memory", f"no server starts with {SAVER}: {error}")
            return
        self.servers.settle()
        with wl.connect(
            trainer=wl.trainer("torch", model=self.model),
            rollout=self.rollout(sleeper),
            verify=self.options.verify,
            release=("weights", "kv_cache"),
        ) as lane:
            self.figures["memory"] = [line for line in str(lane.plan()).splitlines() if "releas" in line]
            lane.sync(version=5000)
            held, words = self.hashes(sleeper), [self.said(sleeper) for _ in range(GREEDY_RUNS)]
            awake = self.free_memory()
            lane.sleep()
            asleep = self.free_memory()
            if self.options.device == "cpu":
                self.not_shown("memory: what a release frees", "SGLang frees nothing on a CPU")
            else:
                nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
                told = {"freed": asleep - awake, "weights": nbytes}
                self.check("memory: a release frees the weights", asleep - awake >= nbytes, told)
            self._refused(lane, "asleep")
            lane.wake()
            left = awake - self.free_memory()
            self.check("memory: a wake takes back as much", abs(left) <= SLACK, {"not taken back": left})
            if self.options.device == "cuda":
                self._refused(lane, "awake, and its weights lost")
            lane.sync(version=5001)
            self.same_as_started("memory: after a sleep", self.hashes(sleeper), held)
            compared = compare([self.said(sleeper) for _ in range(GREEDY_RUNS)], words)
            self.check("memory: log-probs as before the sleep", not compared.told_apart, compared.told())

    def _refused(self, lane: Any, when: str) -> None:
        try:
            lane.replicas[0].generate([[1, 2, 3]], max_tokens=1)
        except Exception as error:  # noqa: BLE001 - it must be the lane's own refusal
            refused = isinstance(error, NotServableError)
            self.check(f"memory: nothing is generated {when}", refused, str(error)[:300])
        else:
            self.check(f"memory: nothing is generated {when}", False, "it generated")

    # -- speed ----------------------------------------------------------------------------------------------

    def show_speed(self) -> None:
        """Seconds a sync, counted and not hashed, as often as each mode's share of the time allows."""
        modes = [mode for mode in ("full", "adapter", "merged") if mode in self.options.modes]
        models = {"full": self.model, "merged": self.wrapped, "adapter": self.wrapped}
        moves = {"full": change, "merged": change_adapter, "adapter": change_adapter}
        for number, mode in enumerate(modes):
            engine = self.engine("adapted" if mode == "adapter" else "synced")
            for_others = self.seconds_left() * (1 - 1 / (len(modes) - number))
            given = (engine, mode, models[mode], moves[mode], 6000 + 100 * number, for_others)
            self.attempt(f"speed of {mode}", self.counted, *given)

    def counted(
        self, engine: ProbedServer, mode: Any, model: Any, move: Any, version: int, for_others: float
    ) -> None:
        """Two syncs, after which memory is looked at, and ten more of other values; fewer as time goes."""
        with wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=self.rollout(engine),
            mode=mode,
            verify="counts",
            read_back="never",
            bucket_bytes=512 << 20,
        ) as lane:
            self.figures.setdefault("counted", {})[mode] = times = []
            before = nbytes = 0
            for number in range(SYNCS + 2):
                move(model, 100 + number)
                began = time.monotonic()
                nbytes = lane.sync(version=version + number).nbytes
                took = time.monotonic() - began
                times.append(round(took, 4))
                before = self.free_memory() if number == 1 else before
                self.keep()
                if took * _GIVEN_UP > self.seconds_left() - for_others:
                    break
            after = self.free_memory()
        self.say(f"counted, {mode}: {times} s for {nbytes} bytes")
        told = {"before": before, "after": after, "bytes a sync": nbytes, "seconds": times}
        if len(times) < SYNCS + 2:
            self.not_shown(f"{mode}: ten counted syncs", f"there was time for {len(times)}, with two before")
        else:
            name = f"{mode}: ten counted syncs leave GPU memory where it was"
            self.check(name, abs(before - after) <= SLACK, told)

    def show_own(self) -> None:
        """SGLang's own request, all tensors in one, by CUDA IPC as SGLang's own clients send it."""
        synced, trained = self.engine("synced"), self.engine("trained")
        change(self.model, 7)
        self._update(synced)
        other, wanted = (self.hashes(engine)[0]["live"] for engine in (synced, trained))
        unlike = len(differing(other, wanted))
        self.check("SGLang's own update: control, of other weights it has other bits", unlike > 0, unlike)
        put_back(self.model, self.trained)
        self.figures["SGLang's own update"] = {"seconds": [self._update(synced) for _ in range(SYNCS)]}
        self.same_as_started("SGLang's own update", self.hashes(synced), self.hashes(trained))

    def _update(self, server: ProbedServer) -> float:
        if self.options.device == "cuda":
            torch.cuda.synchronize()  # the server reads what lies there
        began = time.monotonic()
        body = _own_request([(name, item.detach()) for name, item in self.model.named_parameters()])
        server.send(UPDATE_ROUTE, (body,), len(body))
        return round(time.monotonic() - began, 4)

    # -- what is left ---------------------------------------------------------------------------------------

    def seconds_left(self) -> float:
        return float(self.options.seconds - (time.monotonic() - self.started))

    def not_shown(self, name: str, why: str) -> None:
        self.figures["not shown"][name] = why
        self.keep()
        self.say(f"not shown  {name}: {why}")


def _own_request(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """As SGLang's own clients make it: IPC handles of tensors on a GPU. Tensors of a CPU go by value.

    Where SGLang puts the GPU's UUID this has its number, which is the same in both processes here.
    """
    if tensors[0][1].is_cuda:
        payload = base64.b64encode(bytes(ForkingPickler.dumps(tensors)))
    else:
        payload = b"".join(EncodedBucket(tensors).pieces)
    return json.dumps({PAYLOAD_FIELD: [payload.decode()], "load_format": None, "flush_cache": False}).encode()
