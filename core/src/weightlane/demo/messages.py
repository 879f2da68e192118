"""What the demo's command and its trainer ranks tell each other: one JSON line a message."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightlane.demo.settings import Lesson
from weightlane.errors import ProtocolError
from weightlane.failures import Failure


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Command to rank, once, on its standard input: everything it needs to begin."""

    trainer: str
    rollout: str
    mode: str
    model: str
    url: str
    steps: int
    sync_each_step: bool
    lesson: Lesson


class ModelReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="model-ready"):
    """Rank 0 has imported what it needs and has written the tiny model, where one was asked for."""


class Connected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="connected"):
    """The lane stands. `plan` is as printed; `parameters` counts elements, tied ones once."""

    plan: str
    architecture: str
    parameters: int


class StepReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """One step. `trainer_version` names the weights the trainer held when it asked for samples.

    `rollout_versions` are the distinct versions that the engine says its samples came from, None for
    samples without one. `reward` is the mean over all sampled tokens. `nbytes`, `sync_seconds` and
    `unchanged_since` are None in a step without a sync; the last also where the wire's digest was new.
    `update_lost` is the sync's own (`weightlane.lane_messages.SyncReport`).
    """

    step: int
    trainer_version: int
    rollout_versions: tuple[int | None, ...]
    reward: float
    tokens: int
    probs_diff_mean: float
    probs_diff_max: float
    pearson: float | None
    generate_seconds: float
    train_seconds: float
    nbytes: int | None = None
    sync_seconds: float | None = None
    unchanged_since: int | None = None
    verified: str = ""
    update_lost: float | None = None


class Closing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="closing"):
    """After the last step: the engine's greedy tokens as the trainer sees them, and the ranks' copies.

    `greedy_gap` is the largest distance, in log-probs, between a greedy token of the engine and the trainer's
    own best token at that place; 0 means the same tokens throughout.
    """

    trainer_version: int
    rollout_versions: tuple[int | None, ...]
    greedy_tokens: int
    greedy_differing: int
    greedy_gap: float
    logprob_diff_max: float
    replicas_equal: bool


class LastProbs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="last-probs"):
    """Probabilities of the last step's sampled tokens, aligned: the engine's and the trainer's."""

    rollout: tuple[float, ...]
    actor: tuple[float, ...]


class Broken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="broken"):
    """A rank could not go on."""

    failure: Failure


RankMessage: TypeAlias = ModelReady | Connected | StepReport | LastProbs | Closing | Broken


def line_of(message: msgspec.Struct) -> bytes:
    """The message as one line."""
    return msgspec.json.encode(message) + b"\n"


def read_rank_message(line: bytes, *, rank: int) -> RankMessage:
    """Reads one line from a rank.

    Raises:
        ProtocolError: it is not a message of the demo.
    """
    try:
        return msgspec.json.decode(line, type=RankMessage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"Trainer rank {rank} sent a line that is not a message of the demo: {error}.",
            f"It begins with {line[:80]!r}.",
            "Install the same weightlane for all processes of the demo.",
        ) from error
