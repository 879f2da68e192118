"""Target modules in the words of an engine: one translation, for its launch and for every load.

An engine is launched for modules and then loaded with adapters on some of them; where the two are worked out
apart, they differ (verl #7288, #7413). `engine_targets` is asked both times: at launch it knows the
configuration alone, at load also the modules that tensors exist for, and then it needs no words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightlane.errors import PlanError, Problem, near_names

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

ALL_LINEAR = "all-linear"
"""peft's word for every linear module but the output layer."""

_MOST_NEAR_NAMES = 20


class TargetWords(NamedTuple):
    """How an engine names the modules that LoRA may be on.

    `everything` is its word for all of them, "" where it has none. `allowed` are the leaf names that the
    installed engine takes, None where that is not known or not limited.
    """

    engine: str
    everything: str = ""
    allowed: frozenset[str] | None = None


SGLANG_EVERYTHING = "all"
"""What `--lora-target-modules` of SGLang takes for all that it supports."""


def engine_targets(
    targets: Sequence[str] | str | None, words: TargetWords, *, modules: Iterable[str] | None = None
) -> tuple[str, ...]:
    """The list that an engine is launched or loaded with: sorted leaf names, or its one word for everything.

    Args:
        targets: `target_modules` of a declaration: names, `all-linear`, a regex, or None.
        words: of the engine.
        modules: the modules that tensors exist for, by checkpoint name, once they are known. Their leaf names
            are the list then, whatever `targets` says: a regex has become what it matched.

    Raises:
        PlanError: a regex, or `all-linear` towards an engine without a word for it, while modules are not
            known; no targets at all; a name that the installed engine does not take, each of them.
    """
    if modules is not None:
        return _allowed(_leaves(modules), words)
    if targets == ALL_LINEAR or (isinstance(targets, str) and targets == words.everything != ""):
        if words.everything:
            return (words.everything,)
        raise PlanError([_not_a_list(str(targets), words, "it has no word for every linear module")])
    if isinstance(targets, str):
        why = "it takes names alone, and which modules a pattern matches only the trainer's model tells"
        raise PlanError([_not_a_list(targets, words, why)])
    if not targets:
        raise PlanError([_not_a_list(repr(targets), words, "it would be launched without any module")])
    return _allowed(_leaves(targets), words)


def unserved_modules(
    modules: Iterable[str],
    served: Collection[str],
    *,
    packed: Mapping[str, Sequence[str]],
    receiver: str,
) -> list[Problem]:
    """Modules of an adapter that an engine was launched without LoRA for: it would serve the base there.

    Args:
        modules: of the adapter, by checkpoint name.
        served: the leaf names that the engine was launched for; either side of `packed` may be named.
        packed: the checkpoint leaves in each fused module of the engine's (`WorkerDescription.packed`).
        receiver: how to call the engine.
    """
    members = {member for fused in served for member in packed.get(fused, ())}
    problems: list[Problem] = []
    for leaf in _leaves(modules):
        if leaf in packed:
            what = (
                f"{receiver} takes its parts {', '.join(packed[leaf])}, and an adapter on the whole is none"
            )
            fix = "Mode merged could carry it."
            problems.append(Problem("adapter-target", leaf, what, fix))
        elif leaf not in served and leaf not in members:
            near = near_names(leaf, served) if len(problems) < _MOST_NEAR_NAMES else ()
            what = f"{receiver} was launched without LoRA on it: {', '.join(sorted(served)) or 'on nothing'}"
            problems.append(
                Problem("adapter-target", leaf, what, "Launch it for the adapter's modules.", near=near)
            )
    return problems


def _leaves(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def _allowed(leaves: tuple[str, ...], words: TargetWords) -> tuple[str, ...]:
    if words.allowed is None:
        return leaves
    problems = [
        Problem(
            "adapter-target",
            leaf,
            f"the installed {words.engine} takes no LoRA on it",
            "Leave it out of target_modules, or use mode merged.",
            near=near_names(leaf, words.allowed),
        )
        for leaf in leaves
        if leaf not in words.allowed
    ]
    if problems:
        raise PlanError(problems)
    return leaves


def _not_a_list(value: str, words: TargetWords, why: str) -> Problem:
    return Problem(
        "peft-config",
        "target_modules",
        f"{value!r} cannot be given to {words.engine} at its launch: {why}",
        f"Use {ALL_LINEAR!r} or a list of names." if words.everything else "Use a list of names.",
    )
