"""Renames between a model's own names and its checkpoint's, turned round without doing them twice.

transformers declares them for one direction. Turned round they must leave alone what already is in the other
form: `^model` to `model.language_model` would fit that form again and again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_GROUP = re.compile(r"\(.*\)")


def reversed_renames(declared: Mapping[str, str]) -> dict[str, str]:
    """Prefix to prefix, from the model's to the checkpoint's, of a table of regular expressions.

    Of `^model(?!\\.visual)` the prefix is `model`: what a pattern excludes is no part of a name.
    """
    return {
        new.strip("."): _GROUP.sub("", pattern).lstrip("^").rstrip("\\.") for pattern, new in declared.items()
    }


def renamed_once(name: str, prefixes: Mapping[str, str]) -> str:
    """`name` with the first prefix that fits replaced. Whole parts are compared; twice is the same as once.

    A prefix is passed over where the name has the form already that some prefix would give it.
    """
    for old, new in prefixes.items():
        if not _begins(name, old):
            continue
        done = [form for form in prefixes.values() if _begins(form, old) and _begins(name, form)]
        return name if done else new + name[len(old) :]
    return name


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
