"""What weightlane must do, as `requirements.toml` lists it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REQUIREMENTS = Path(__file__).with_name("requirements.toml")


@dataclass(frozen=True)
class Requirement:
    """One line; `upstream` are numbers of issues and pull requests, see the head of the file."""

    id: str
    area: str
    text: str
    upstream: tuple[int, ...] = ()


def read_requirements(path: Path = REQUIREMENTS) -> dict[str, Requirement]:
    """Every requirement by its id, in the order of the file."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: Requirement(name, fields["area"], fields["text"], tuple(fields.get("upstream", ())))
        for name, fields in found.items()
    }
