"""The training loop on every rank: sync, sample from the engine, learn from the samples, compare."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

import weightlane as wl
from weightlane.demo.messages import Closing, Connected, LastProbs, StepReport
from weightlane.demo.metrics import agreement
from weightlane.demo.model import ADAPTER, architecture_of, load_actor, parameter_count
from weightlane.demo.training import (
    actor_logits,
    chosen_logprobs,
    copies_are_equal,
    draw_prompts,
    rewards_of,
    samples_of,
    share_samples,
    train_step,
)
from weightlane.errors import EngineError
from weightlane.types import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.demo.messages import Task
    from weightlane.demo.parent import ParentLine
    from weightlane.demo.training import Samples
    from weightlane.lane import Lane
    from weightlane.lane_messages import SyncReport
    from weightlane.messages import Generation

_GREEDY_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What the engine gave; `versions` and `seconds` are of rank 0 alone."""

    samples: Samples
    versions: tuple[int | None, ...]
    seconds: float


def run_task(task: Task, parent: ParentLine, *, rank: int) -> None:
    """Does all of `task`. Every rank calls it; rank 0 reports to `parent`.

    Raises:
        WeightlaneError: the plan is refused, a sync failed, or the engine does not answer.
    """
    model = load_actor(task.model, trainer=task.trainer, mode=task.mode, seed=task.lesson.seed)
    # One rank may have had to read far more from disk than the other. Bounded by the group's own timeout.
    dist.barrier()
    rollout = [wl.rollout(task.rollout, url=task.url, model=task.model)] if rank == 0 else None
    adapter = None if task.mode == Mode.FULL.value else ADAPTER
    lane = wl.connect(
        trainer=wl.trainer(task.trainer, model=model, adapter=adapter),
        rollout=rollout,
        mode=task.mode,  # type: ignore[arg-type] # text from the command line; connect refuses others
    )
    with contextlib.closing(lane):
        if rank == 0:
            parent.tell(Connected(str(lane.plan()), architecture_of(model), parameter_count(model)))
        _Loop(task, parent, lane, model, rank).run()


class _Loop:
    """One rank's loop. The trainer's version is the number of the step that it is about to learn from."""

    def __init__(self, task: Task, parent: ParentLine, lane: Lane, model: Any, rank: int) -> None:
        self._task = task
        self._parent = parent
        self._lane = lane
        self._model = model
        self._rank = rank
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=task.lesson.learning_rate)

    def run(self) -> None:
        last = LastProbs((), ())
        for step in range(1, self._task.steps + 1):
            synced = self._lane.sync(version=step) if step == 1 or self._task.sync_each_step else None
            sampled = self._sample(step)
            started = time.monotonic()
            actor = train_step(self._model, self._optimizer, sampled.samples, self._rank)
            train_seconds = time.monotonic() - started
            mask = sampled.samples.mask
            last = LastProbs(
                tuple(sampled.samples.rollout_logprobs[mask].exp().tolist()),
                tuple(actor.double()[mask].exp().tolist()),
            )
            if self._rank == 0:
                rewards = rewards_of(sampled.samples.tokens)[mask]
                found = agreement(last.rollout, last.actor)
                self._parent.tell(
                    StepReport(
                        step=step,
                        trainer_version=step,
                        rollout_versions=sampled.versions,
                        reward=float(rewards.mean()),
                        tokens=int(mask.sum()),
                        probs_diff_mean=found.diff_mean,
                        probs_diff_max=found.diff_max,
                        pearson=found.pearson,
                        generate_seconds=sampled.seconds,
                        train_seconds=train_seconds,
                        nbytes=synced.nbytes if synced else None,
                        sync_seconds=synced.seconds if synced else None,
                        unchanged_since=synced.unchanged_since if synced else None,
                        verified=_verified(synced),
                        update_lost=synced.update_lost if synced else None,
                    )
                )
        if self._rank == 0:
            self._parent.tell(last)
        self._close()

    def _sample(self, step: int) -> _Sampled:
        """Continuations from the engine, on rank 0, and from there to all."""
        lesson = self._task.lesson
        if self._rank != 0:
            return _Sampled(share_samples(None, lesson), (), 0.0)
        prompts = draw_prompts(lesson, step=step, vocabulary=self._vocabulary)
        started = time.monotonic()
        generations = self._generate(prompts, temperature=1.0, seed=lesson.seed + step)
        seconds = time.monotonic() - started
        samples = samples_of(prompts, generations, new_tokens=lesson.new_tokens)
        return _Sampled(share_samples(samples, lesson), _versions(generations), seconds)

    def _generate(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, seed: int
    ) -> tuple[Generation, ...]:
        engine = self._lane.replicas[0]
        generations = engine.generate(
            prompts,
            max_tokens=self._task.lesson.new_tokens,
            temperature=temperature,
            seed=seed,
            adapter=self._lane.adapter_ref() if self._task.mode == Mode.ADAPTER.value else None,
        )
        if len(generations) != len(prompts) or not all(item.token_ids for item in generations):
            raise EngineError(
                f"{engine.address} gave {len(generations)} continuations for {len(prompts)} prompts, "
                f"{sum(not item.token_ids for item in generations)} of them empty.",
                "There is nothing to learn from.",
                "Look at the engine's log.",
            )
        return generations

    def _close(self) -> None:
        """Publishes the final weights, and has the engine continue greedily where the trainer can look."""
        version = self._task.steps + 1
        if self._task.sync_each_step:
            self._lane.sync(version=version)
        equal = copies_are_equal(self._model)
        lesson = msgspec.structs.replace(self._task.lesson, prompts=_GREEDY_PROMPTS)
        generations: tuple[Generation, ...] = ()
        mine = None
        if self._rank == 0:
            prompts = draw_prompts(self._task.lesson, step=version, vocabulary=self._vocabulary)
            generations = self._generate(prompts[:_GREEDY_PROMPTS], temperature=0.0, seed=0)
            mine = samples_of(prompts[:_GREEDY_PROMPTS], generations, new_tokens=lesson.new_tokens)
        samples = share_samples(mine, lesson)
        with torch.no_grad():  # on every rank: the forward of a sharded model is a collective
            logits = actor_logits(self._model, samples)
        if self._rank != 0:
            return
        chosen = chosen_logprobs(logits, samples.tokens)[samples.mask]
        best = logits.log_softmax(-1).max(-1)
        differing: Tensor = best.indices[samples.mask] != samples.tokens[samples.mask]
        self._parent.tell(
            Closing(
                trainer_version=version,
                rollout_versions=_versions(generations),
                greedy_tokens=int(samples.mask.sum()),
                greedy_differing=int(differing.sum()),
                greedy_gap=float((best.values[samples.mask] - chosen).max()),
                logprob_diff_max=float((chosen - samples.rollout_logprobs[samples.mask]).abs().max()),
                replicas_equal=equal,
            )
        )


def _versions(generations: Sequence[Generation]) -> tuple[int | None, ...]:
    """The distinct versions, None first."""
    found = {item.weight_version for item in generations}
    return tuple(sorted(found, key=lambda version: -1 if version is None else version))


def _verified(report: SyncReport | None) -> str:
    return "; ".join(replica.verified for replica in report.replicas) if report else ""
