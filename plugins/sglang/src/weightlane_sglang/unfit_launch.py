"""Launch arguments under which every request of a sync succeeds and other weights answer.

A server tells them in `/server_info`. What it does with them was read in SGLang 0.5.18 and 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightlane.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.facts import EngineFacts


class _Unfit(NamedTuple):
    """An argument, what it may be set to all the same, and what any other value does."""

    argument: str
    harmless: frozenset[str]
    what: str
    fix: str


_UNFIT = (
    # utils/offloader.py, OffloaderV2: `start_onload` at the end of a forward copies the first layers of the
    # next one; in its modes shm_cpu and sharded_gpu the parameters that a loader sees hold no memory at all.
    _Unfit(
        "offload_group_size",
        frozenset({"-1", "0"}),
        "the server keeps layers outside of its model ({value} to a group) and fetches the first of them "
        "ahead, so that after a sync old weights of them answer, once or for ever",
        "Start it without --offload-group-size (--cpu-offload-gb fetches each layer when it is needed).",
    ),
    # layers/moe/kt_ep_wrapper.py reads the experts on the CPU from this folder, once.
    _Unfit(
        "kt_weight_path",
        frozenset({""}),
        "experts on the CPU are read from {value}, and no update by name reaches them",
        "Start it without --kt-weight-path.",
    ),
    _Unfit(
        "torchao_config",
        frozenset({""}),
        "the server quantizes its weights once they are loaded ({value}), and a tensor written over them by "
        "name would not be",
        "Start it without --torchao-config.",
    ),
    _Unfit(
        "modelopt_quant",
        frozenset({""}),
        "the server quantizes its weights once they are loaded ({value}), and a tensor written over them by "
        "name would not be",
        "Start it without --modelopt-quant.",
    ),
    # managers/multi_tokenizer_mixin.py and tokenizer_control_mixin.py: each worker has a label of its own,
    # which 0.5.18 sets in one and 0.5.23 in all.
    _Unfit(
        "tokenizer_worker_num",
        frozenset({"0", "1"}),
        "{value} processes answer at its port: a pause waits for the requests of one of them alone, and the "
        "new version may be told to that one alone, so that answers of the others carry the old label",
        "Start it with --tokenizer-worker-num 1.",
    ),
    _Unfit(
        "json_model_override_args",
        frozenset({"", "{}"}),
        "the server changes the configuration of its checkpoint ({value}), from which names and shapes are "
        "checked; it drops a wrong name silently and dies of a wrong shape",
        "Write the change into the config.json, and start it without --json-model-override-args.",
    ),
)


def unfit_launch(facts: EngineFacts) -> Iterator[Problem]:
    """A problem for each argument that stands against a sync; what it does not tell is none."""
    for item in _UNFIT:
        value = facts.launch_arguments.get(item.argument)
        if value is not None and value not in item.harmless:
            yield Problem("capability", item.argument, item.what.format(value=value), item.fix)
