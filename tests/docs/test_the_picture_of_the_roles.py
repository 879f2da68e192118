"""The picture of the four roles can be read by a browser, by whoever cannot see it, and shows all four."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="session")
def picture(docs: Path) -> str:
    return (docs / "roles.svg").read_text()


@pytest.fixture(scope="session")
def roles(docs: Path) -> list[str]:
    """The roles of the page that shows it, by the first column of its table."""
    table = (docs / "roles.rst").read_text().split("What passes between them")[0]
    return re.findall(r"^   \* - (?!Role$)(.+)$", table, re.MULTILINE)


def faults(picture: str, roles: list[str]) -> list[str]:
    """What keeps it from being read. Raises ParseError where it is not well-formed."""
    root = ET.fromstring(picture)  # noqa: S314 - a file of this repository
    found = [] if root.tag == f"{SVG}svg" else [f"its root is {root.tag}"]
    labels = root.get("aria-labelledby", "").split()
    for name in ("title", "desc"):
        element = root.find(f"{SVG}{name}")
        if element is None or not (element.text or "").strip():
            found.append(f"no {name}")
        elif element.get("id") not in labels:
            found.append(f"{name} does not label it")
    seen = " ".join("".join(element.itertext()) for element in root.iter(f"{SVG}text")).lower()
    told = "".join(root.findtext(f"{SVG}desc") or "").lower()
    found += [f"{role} is not shown" for role in roles if role not in seen]
    return found + [f"{role} is not described" for role in roles if role not in told]


def test_it_is_well_formed_described_and_shows_the_four_roles(picture: str, roles: list[str]) -> None:
    assert roles == ["trainer rank", "controller", "engine front", "engine worker"]
    assert faults(picture, roles) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Engine front</text>", "Engine</text>", "engine front is not shown"),
        ("the engine front above", "one above", "engine front is not described"),
        ("<title id=", "<metadata id=", "no title"),
        ('id="wl-roles-desc"', 'id="other"', "desc does not label it"),
    ],
)
def test_what_is_missing_is_told(picture: str, roles: list[str], old: str, new: str, fault: str) -> None:
    assert old in picture
    closed = picture.replace("</title>", "</metadata>") if "metadata" in new else picture
    assert fault in faults(closed.replace(old, new), roles)


def test_a_picture_that_is_cut_short_is_no_picture(picture: str, roles: list[str]) -> None:
    with pytest.raises(ET.ParseError):
        faults(picture[:-20], roles)
