"""Which entry of `rank_pattern` and `alpha_pattern` holds for a module: peft's own rule, which has changed.

Read in the releases themselves (`LoraModel._create_and_replace`, `get_pattern_key`) and tested against them:

* until 0.13: one list, ranks before alphas; the first key that is a whole dotted suffix of the module's name
  is looked up in both, so that a rank's key hides a later alpha's;
* 0.14: a list for each;
* since 0.15: a list for each, a key may also be the whole name, and its alternatives (`a|b`) are grouped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class PatternRule(NamedTuple):
    """How keys are matched: `separate` lists or one, `whole` names and grouped alternatives or suffixes."""

    since: str
    separate: bool
    whole: bool


RULES = (
    PatternRule("0", separate=False, whole=False),
    PatternRule("0.14", separate=True, whole=False),
    PatternRule("0.15", separate=True, whole=True),
)


def release_of(peft_version: str) -> Version | None:
    """The release in a recorded `peft_version` (`0.19.2.dev0@abc` is 0.19.2); None when it tells none."""
    try:
        return Version(Version(peft_version.partition("@")[0]).base_version)
    except InvalidVersion:
        return None


def rules_of(peft_version: str) -> tuple[PatternRule, ...]:
    """The rule of a release; every rule where the release is not known."""
    release = release_of(peft_version)
    if release is None:
        return RULES
    return (next(rule for rule in reversed(RULES) if release >= Version(rule.since)),)


def looked_up(
    rule: PatternRule, ranks: Mapping[str, int], alphas: Mapping[str, float], module: str
) -> tuple[int | None, float | None]:
    """Rank and alpha that the patterns give a module, by its name in the trainer's model; None for none."""
    if rule.separate:
        rank_key, alpha_key = _key(rule, ranks, module), _key(rule, alphas, module)
    else:
        rank_key = alpha_key = _key(rule, [*ranks, *alphas], module)
    return ranks.get(rank_key), alphas.get(alpha_key)


def _key(rule: PatternRule, keys: Iterable[str], module: str) -> str:
    for key in keys:
        if re.match(rf"(.*\.)?({key})$" if rule.whole else rf".*\.{key}$", module):
            return key
    return module
