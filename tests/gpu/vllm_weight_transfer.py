"""A program: vLLM's own weight transfer with our backend, from a trainer in a process of its own, on a GPU.

`LLM(weight_transfer_config={"backend": "weightlane"})` is updated by `WeightSender`, and another engine is
started from the same weights: every live tensor must have the same bits, and what both say must not be told
apart. Updates that are cut short or whose bytes are others must be refused, and the next one must heal. The
same weights then go through vLLM's layerwise reload. Figures go to OUT/figures.json, whatever happened.

    python tests/gpu/vllm_weight_transfer.py OUT
    python tests/gpu/vllm_weight_transfer.py OUT --size tiny --device cpu --engine-python PYTHON
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from probed_transfers import FrontSyncClient, asked_reload
from proof import SLACK, SYNCS
from proof_models import change, exported_tensors, kept_of, make_base, put_back, save_checkpoint
from proof_words import BATCH_INVARIANT
from run_proof import prove, status_of
from run_spread import differing, largest_difference
from vllm_proof import VllmProof

from weightlane.types import Phase
from weightlane_vllm.transfer_sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.front.client import FrontEndpoint

BUCKET_BYTES = 256 << 20
BACKEND = ("--weight-transfer", "weightlane")


class TransferProof(VllmProof):
    """One engine that is updated, and one that was started from what it is updated with."""

    def run(self) -> None:
        """All of it; each engine is started once."""
        options = self.options
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        first, trained = self.scratch / "first", self.scratch / "trained"
        with self.timed("models"):
            model = make_base(options.size, device=options.device, dtype=dtype)
            save_checkpoint(first, model, exported_tensors(model, Phase.FULL))
            change(model, 1)
            save_checkpoint(trained, model, exported_tensors(model, Phase.FULL))
        updated = self.engine("updated", first, *BACKEND)
        started = self.engine("started", trained)
        held = kept_of(model)
        self.attempt("updates", self.updates, updated, started, model, held)
        self.attempt("reload", self.reload, updated, started, model, trained)

    def updates(
        self, updated: FrontEndpoint, started: FrontEndpoint, model: Any, held: dict[str, torch.Tensor]
    ) -> None:
        client = FrontSyncClient(updated)
        self.refused("a part of the model", "would be written by nothing", lambda: _sender(client, model, 1))
        untouched, before = self.said(updated), self.hashes(updated)
        others = [
            len(differing(ours["live"], theirs["live"]))
            for ours, theirs in zip(before, self.hashes(started), strict=True)
        ]
        self.check("control, other weights have other bits", all(others), others)
        with self.timed("announced and traced"):
            sender = _sender(client, model)
        with self.timed("first update, read back"):
            sender.send()
        self.figures["bytes"] = sum(item.nbytes for item in held.values())
        moved = largest_difference(untouched, self.said(updated))
        self.check("the update moved log-probs", moved > 1e-2, moved)
        self.same_as_started("first update", self.hashes(updated), self.hashes(started))
        self.same_words("first update", updated, started)
        self.ten_updates(sender, model)
        change(model, 300)
        self.refused("an update that is cut short", "is not whole", lambda: _cut_short(client))
        self.refused("other bytes", "is not what was sent", lambda: _other_bytes(client, sender))
        put_back(model, held)
        sender.send()
        self.same_as_started("after refusals", self.hashes(updated), self.hashes(started))
        sender.close()

    def ten_updates(self, sender: WeightSender, model: Any) -> None:
        """Each of other values; the GPU's free memory afterwards is what it was before."""
        change(model, 100)
        sender.send()
        before, times = self.free_memory(), []
        for number in range(SYNCS):
            change(model, 200 + number)
            with self.timed(f"update {number}"):
                sender.send()
            times.append(self.figures["seconds"].pop(f"update {number}"))
        after = self.free_memory()
        told = {"before": before, "after": after, "seconds": times}
        self.check("ten updates leave GPU memory where it was", abs(before - after) <= SLACK, told)

    def reload(self, updated: FrontEndpoint, started: FrontEndpoint, model: Any, trained: Path) -> None:
        """Other weights first, so that what is there afterwards is of the reload."""
        change(model, 400)
        sender = _sender(FrontSyncClient(updated), model)
        sender.send()
        for seen in asked_reload(updated, trained):
            wanted = {
                "vLLM's left open": True,
                "left open": False,
                "addresses stay": True,
                "traced alike": True,
            }
            emptied = seen.pop("emptied")
            self.check("reload: layers had no data in between", emptied > 0, emptied)
            self.check("reload: in place, whole and traced as before", seen == wanted, seen)
        self.same_as_started("reload", self.hashes(updated), self.hashes(started))
        self.same_words("reload", updated, started)
        change(model, 500)
        sender.send()
        others = [
            len(differing(ours["live"], theirs["live"]))
            for ours, theirs in zip(self.hashes(updated), self.hashes(started), strict=True)
        ]
        self.check("reload: an update afterwards arrives", all(others), others)
        sender.close()

    def refused(self, name: str, word: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, its text has to say why
            self.check(f"refused: {name}", word in str(error), str(error)[-300:])
        else:
            self.check(f"refused: {name}", False, "it was taken")


def _sender(client: FrontSyncClient, model: Any, left_out: int = 0) -> WeightSender:
    def tensors() -> list[tuple[str, torch.Tensor]]:
        named = list(model.named_parameters())
        return named[: len(named) - left_out]

    return WeightSender(client, tensors, bucket_bytes=BUCKET_BYTES)


def _cut_short(client: FrontSyncClient) -> None:
    client.start_weight_update()
    try:
        client.finish_weight_update()
    finally:
        with contextlib.suppress(Exception):  # newer ones end a session at an update that fails
            client.update_weights({"bucket": -1, "digest": ""})


def _other_bytes(client: FrontSyncClient, sender: WeightSender) -> None:
    honest = client.update_weights
    client.update_weights = lambda info: honest({**info, "digest": "0" * 16})  # type: ignore[method-assign]
    try:
        sender.send()
    finally:
        del client.update_weights  # type: ignore[method-assign]  # the class's own shows again


def main() -> int:
    """0 when every check passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--size", default="half-billion", choices=("half-billion", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--kernels", default="default", choices=("default", BATCH_INVARIANT))
    parser.set_defaults(tensor_parallel=1)
    options = parser.parse_args()
    figures = prove(options, TransferProof)
    return status_of(options, figures)


if __name__ == "__main__":
    raise SystemExit(main())
