"""Trainer and `AsyncLLM` in one process, requests running all the while; writes what was seen, as JSON.

python running_requests.py MODEL ANSWER SYNCS END     (SYNCS: how many of each kind)

END is how the engine ends: `killed`, or `removed`: an adapter goes while a request names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from running_load import Load, Record, Versions

import weightlane as wl
from weightlane.bounds import DEFAULT_BOUNDS
from weightlane.transports.shm import ShmSink
from weightlane_vllm.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG = [tuple((7 * place + 13 * number + 3) % 512 for place in range(200)) for number in range(3)]
"""More than one block of the prefix cache, which is 128 tokens on a CPU."""
TOKENS = 24


def main() -> None:
    folder, answer, syncs, end = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    from transformers import AutoModelForCausalLM
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=folder,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        worker_extension_cls="weightlane_vllm.worker_extension.WeightlaneWorkerExtension",
    )
    loop = LoopThread()
    engine = loop.call(lambda: AsyncLLM.from_engine_args(arguments), 300.0)
    try:
        bench = Bench(engine, Load(engine, loop), syncs)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        seen: dict[str, Any] = {}
        for name, check in (
            ("drain", lambda: full_syncs(bench, model, "drain", 1)),
            ("abort", lambda: full_syncs(bench, model, "abort", 101)),
            ("keep", lambda: kept_ones_go_on(bench, model, 201)),
            ("late", lambda: one_that_does_not_end(bench, model, 301)),
            ("stale", lambda: stale_prefixes(bench, model, 401)),
            ("two_slot", lambda: adapters_beside(bench, folder)),
            ("paused", lambda: adapters_in_place(bench, folder)),
            ("dropped", lambda: adapters_dropped_by_a_base(bench, folder, model)),
            ("end", (lambda: killed(bench, model)) if end == "killed" else (lambda: removed(bench, folder))),
        ):
            started = time.monotonic()
            seen[name] = check()
            seen[name]["seconds"] = round(time.monotonic() - started, 1)
            print(name, json.dumps(seen[name])[:1500], flush=True)
        answer.write_text(json.dumps(seen))
    finally:
        loop.call(engine.shutdown, 60.0)
        loop.close()


@dataclasses.dataclass
class Bench:
    engine: Any
    load: Load
    syncs: int

    @contextmanager
    def lane(self, model: Any, **options: Any) -> Iterator[Any]:
        with wl.connect(
            trainer=wl.trainer("torch", model=model),
            rollout=[wl.rollout("vllm", engine=self.engine)],
            **options,
        ) as lane:
            yield lane


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    trained = [item for item in model.named_parameters() if ".lora_" in item[0]] or list(
        model.named_parameters()
    )
    for name, parameter in trained:
        scale = 0.1 if ".lora_" in name else 0.05 * float(parameter.std())
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def told(versions: Versions, records: list[Record]) -> dict[str, Any]:
    """What the outputs of a load say of the versions that made them."""
    whole = [record for record in records if record.tokens]
    makers = [versions.makers(record) for record in whole]
    labels = [sorted({label for _, label in record.labels}) for record in whole]
    return {
        "requests": len(records),
        "errors": sorted({record.error for record in records if record.error}),
        "reasons": sorted({record.reason for record in records if not record.error}),
        "by_one_version": all(len(found) == 1 for found in makers),
        "makers": sorted({found[0] for found in makers if found}),
        "as_labelled": all(
            [str(found[0])] == label for found, label in zip(makers, labels, strict=True) if found
        )
        if any(labels)
        else None,
        "as_named": all(found == [record.named] for found, record in zip(makers, whole, strict=True)),
        "hit_the_prefix_cache": sum(record.cached >= 128 for record in whole),
        "aborted": sum(record.reason == "abort" for record in records),
    }


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - told to the test
        return f"{type(error).__name__}: {error}"
    return ""


def full_syncs(bench: Bench, model: Any, requests: str, first: int) -> dict[str, Any]:
    versions = Versions(model)
    asked: list[Any] = []
    with bench.lane(model, requests=requests) as lane:
        change(model, first)
        versions.keep(first)
        lane.sync(version=first)
        bench.load.begin(LONG, TOKENS, lambda: None)
        for version in range(first + 1, first + 1 + bench.syncs):
            time.sleep(0.5)
            change(model, version)
            versions.keep(version)
            # Through the front too, at any moment of the sync.
            through = threading.Thread(
                target=lambda: asked.extend(lane.replicas[0].generate([LONG[0]], max_tokens=40))
            )
            if requests == "drain":
                through.start()
            lane.sync(version=version)
            if requests == "drain":
                through.join(60.0)
        bench.load.start(LONG[1], TOKENS, None)  # whatever the others are at, one is the last version's
        plan = str(lane.plan())
        seen = told(versions, bench.load.end())
    fronts = [
        versions.makers(Record(LONG[0], 0, item.token_ids, item.logprobs)) == [item.weight_version]
        for item in asked
    ]
    return {**seen, "through_the_front": fronts, "schedule": plan[plan.index("schedule") :]}


def kept_ones_go_on(bench: Bench, model: Any, first: int) -> dict[str, Any]:
    versions = Versions(model)
    with bench.lane(model, requests="keep") as lane:
        change(model, first)
        versions.keep(first)
        lane.sync(version=first)
        for prompt in LONG:
            bench.load.start(prompt, 250, None)
        change(model, first + 1)
        versions.keep(first + 1)
        lane.sync(version=first + 1)
        records = bench.load.end()
    spans = [[start for start, _ in record.labels] for record in records]
    parts = [
        (versions.makers(record, 0, cut[1]), versions.makers(record, cut[1]))
        for record, cut in zip(records, spans, strict=True)
        if len(cut) == 2
    ]
    return {
        "errors": [record.error for record in records if record.error],
        "lengths": [len(record.tokens) for record in records],
        "spans": spans,
        "first_by_old": all(old == [first] for old, _ in parts),
        "then_by_new": all(new == [first + 1] for _, new in parts),
    }


def one_that_does_not_end(bench: Bench, model: Any, first: int) -> dict[str, Any]:
    """The drain has a bound; a sync that fails there, or before it wrote, lets everything go on."""
    versions = Versions(model)
    bounds = dataclasses.replace(DEFAULT_BOUNDS, drain=0.5, lost_after=3.0)
    with bench.lane(model, transport="shm", bounds=bounds) as lane:
        change(model, first)
        versions.keep(first)
        lane.sync(version=first)
        bench.load.start(LONG[0], 300, None)
        error = raised(lambda: lane.sync(version=first + 1))
        records = bench.load.end()
        with mock.patch.object(ShmSink, "put", side_effect=OSError("the cable is out")):
            unwritten = raised(lambda: lane.sync(version=first + 1))
        served = bench.load.ask(LONG[0], TOKENS, None)
        change(model, first + 2)
        versions.keep(first + 2)
        lane.sync(version=first + 2)
        after = bench.load.ask(LONG[0], TOKENS, None)
    return {
        "error": error,
        "went_on": [versions.makers(record) == [first] for record in records],
        "length": [len(record.tokens) for record in records],
        "unwritten": unwritten,
        "served_on": versions.makers(served) == [first],
        "next": versions.makers(after) == [first + 2],
    }


def stale_prefixes(bench: Bench, model: Any, first: int) -> dict[str, Any]:
    """The control of the reset: without it an old prefix is served, and is seen."""
    from weightlane_vllm.async_llm_calls import AsyncLlmCalls

    versions = Versions(model)
    with bench.lane(model) as lane:
        lane.sync(version=first)
        bench.load.ask(LONG[1], 4, None)
        change(model, first + 1)
        versions.keep(first + 1)
        with mock.patch.object(AsyncLlmCalls, "reset_prefix_cache", return_value=True):
            lane.sync(version=first + 1)
        stale = bench.load.ask(LONG[1], TOKENS, None)
        lane.sync(version=first + 2)
        fresh = bench.load.ask(LONG[1], TOKENS, None)
        with mock.patch.object(AsyncLlmCalls, "reset_prefix_cache", return_value=False):
            failed = raised(lambda: lane.sync(version=first + 3))
        lane.sync(version=first + 4)
    return {
        "stale_hit": stale.cached,
        "stale_is_wrong": versions.makers(stale) == [],
        "fresh_is_right": versions.makers(fresh) == [first + 1],
        "fresh_hit": fresh.cached,
        "failed_reset": failed,
    }


def policy(folder: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        model = get_peft_model(base, config).train(mode=False)
    change(model, 0)
    return model


def adapters_beside(bench: Bench, folder: str) -> dict[str, Any]:
    model = policy(folder)
    versions = Versions(model)
    with bench.lane(model, mode="adapter", requests="drain") as lane:
        change(model, 1)
        versions.keep(1)
        lane.sync(version=1)
        bench.load.begin(LONG, TOKENS, lane.adapter_ref)
        for version in range(2, 2 + bench.syncs):
            time.sleep(0.3)
            bench.load.start(LONG[2], 120, lane.adapter_ref())  # runs on past the publication
            old = lane.adapter_ref()
            change(model, version)
            versions.keep(version)
            lane.sync(version=version)
            refused = bench.load.ask(LONG[0], 4, old)
        bench.load.start(LONG[1], TOKENS, lane.adapter_ref())
        seen = told(versions, bench.load.end())
        seen["refused"] = refused.error
        schedule = str(lane.plan())
    last = 2 + bench.syncs
    with bench.lane(model, mode="adapter", requests="abort") as lane:
        change(model, last)
        versions.keep(last)
        lane.sync(version=last)
        bench.load.start(LONG[0], 300, lane.adapter_ref())
        for version in (last + 1, last + 2):
            change(model, version)
            versions.keep(version)
            lane.sync(version=version)
        aborted = told(versions, bench.load.end())
        # Published again with other values, under the name that a prefix was cached with.
        bench.load.ask(LONG[1], 4, lane.adapter_ref())
    with bench.lane(model, mode="adapter") as lane:
        change(model, last + 7)
        again = Versions(model)
        again.keep(last + 2)
        lane.sync(version=last + 2)
        record = bench.load.ask(LONG[1], TOKENS, lane.adapter_ref())
        seen["published_again"] = again.makers(record) == [last + 2]
    return {**seen, "aborts": aborted, "schedule": schedule[schedule.index("schedule") :]}


def adapters_in_place(bench: Bench, folder: str) -> dict[str, Any]:
    model = policy(folder)
    versions = Versions(model)
    with bench.lane(model, mode="adapter", swap="paused", requests="drain") as lane:
        change(model, 1)
        versions.keep(1)
        lane.sync(version=1)
        bench.load.begin(LONG, TOKENS, lane.adapter_ref)
        for version in range(2, 2 + bench.syncs):
            time.sleep(0.3)
            change(model, version)
            versions.keep(version)
            lane.sync(version=version)
        bench.load.start(LONG[1], TOKENS, lane.adapter_ref())
        return told(versions, bench.load.end())


def adapters_dropped_by_a_base(bench: Bench, folder: str, other: Any) -> dict[str, Any]:
    """Requests that wait while a base is written name what this drops: they end, the engine does not."""
    model = policy(folder)
    with bench.lane(model, mode="adapter") as lane:
        lane.sync(version=1)
        ref = lane.adapter_ref()
        bench.load.begin(LONG, TOKENS, lambda: ref)
        time.sleep(0.3)
        with bench.lane(other) as full:
            full.sync(version=901)
            time.sleep(0.3)
            records = bench.load.end()
            base = bench.load.ask(LONG[0], 4, None)
        lane.sync(version=2)
        versions = Versions(model)
        versions.keep(2)
        again = bench.load.ask(LONG[0], TOKENS, lane.adapter_ref())
    return {
        "aborted": sum(record.reason == "abort" for record in records),
        "refused": sum("not served any more" in record.error for record in records),
        "errors": [it.error for it in records if it.error and "not served any more" not in it.error],
        "base_is_served": base.reason,
        "again": versions.makers(again) == [2],
    }


def killed(bench: Bench, model: Any) -> dict[str, Any]:
    """Behind a front, where it is synced like any other; then a call that runs, and every later one, ends."""
    from weightlane.front.server import serve_front
    from weightlane_vllm.eras import reference_here
    from weightlane_vllm.front_engine import LlmFrontEngine

    versions = Versions(model)
    front = LlmFrontEngine(bench.engine, backend=reference_here(), start_seconds=60.0)
    with tempfile.TemporaryDirectory(prefix="wl-") as private:
        address = f"unix:{private}/front"
        threading.Thread(target=serve_front, args=(front, address), daemon=True).start()
        wait_for(Path(private, "front"))
        with wl.connect(
            trainer=wl.trainer("torch", model=model), rollout=[wl.rollout("vllm", url=address)]
        ) as lane:
            change(model, 999)
            versions.keep(998)
            lane.sync(version=998)
            (said,) = lane.replicas[0].generate([LONG[0]], max_tokens=TOKENS)
            core = bench.engine.engine_core.resources.engine_manager.processes[0].pid
            errors: list[str] = []
            caller = threading.Thread(
                target=lambda: errors.append(
                    raised(lambda: lane.replicas[0].generate([LONG[0]], max_tokens=300))
                )
            )
            caller.start()
            time.sleep(0.3)
            os.kill(core, signal.SIGKILL)
            started = time.monotonic()
            caller.join(30.0)
            return {
                "through_the_front": versions.makers(Record(LONG[0], 0, said.token_ids, said.logprobs)),
                "label": said.weight_version,
                "took": time.monotonic() - started,
                "process": str(core),
                "call": errors,
                "next": raised(lambda: lane.sync(version=999)),
            }


def removed(bench: Bench, folder: str) -> dict[str, Any]:
    """The control of the rule: what becomes of the engine when an adapter goes under a running request."""
    from weightlane.messages import encode
    from weightlane_vllm.served_adapters import AskAdapters

    model = policy(folder)
    with bench.lane(model, mode="adapter") as lane:
        lane.sync(version=1)
        bench.load.start(LONG[0], 300, lane.adapter_ref())
        change(model, 2)
        lane.sync(version=2)
        core = bench.engine.engine_core.resources.engine_manager.processes[0].pid
        at_once = encode(AskAdapters("at-once", ("default@1",)))
        bench.load.loop.run(bench.engine.collective_rpc("weightlane_adapters", args=(at_once,)), 30.0)
        started = time.monotonic()
        (record,) = bench.load.end()
        return {
            "took": time.monotonic() - started,
            "process": str(core),
            "call": [record.error],
            "next": raised(lambda: lane.sync(version=3)),
        }


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30.0
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
