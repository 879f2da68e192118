"""The check that ends `make docs` finds what Sphinx does not look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

WHOLE = """<html><head><link rel="stylesheet" href="_static/a.css?v=1"><link rel="next" href="b.html"></head>
<body><a href="b.html#place">b</a><a href="#here">here</a><h1 id="here"></h1>
<a href="https://example.org/far">far</a><img src="data:image/png;base64,AA=="></body></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static/a.css").write_text("a { color: red; background: url(b.svg) }")
    (tmp_path / "a.html").write_text(WHOLE)
    (tmp_path / "b.html").write_text('<p id="place"></p>')
    return tmp_path


def test_a_whole_site_has_no_problem(script: Callable[[str], ModuleType], site: Path) -> None:
    assert script("check_site").problems_of(site) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('<a href="gone.html">x</a>', "c.html links to gone.html: there is no such file"),
        ('<a href="b.html#gone">x</a>', "c.html links to b.html#gone: the page has no such place"),
        ('<a href="#gone">x</a>', "c.html links to #gone: the page has no such place"),
        ('<link rel="next" href="gone.html">', "c.html links to gone.html: there is no such file"),
        ('<script src="https://cdn.example/x.js"></script>', "c.html loads https://cdn.example/x.js from"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "c.html loads //cdn.example/x.css from"),
        ('<link rel="preconnect" href="https://fonts.example">', "c.html loads https://fonts.example from"),
        ('<img src="gone.png">', "c.html loads gone.png, which does not exist"),
        ("<style>@import 'https://cdn.example/f.css';</style>", "c.html loads https://cdn.example/f.css"),
    ],
)
def test_a_broken_link_or_an_outside_asset_is_named(
    script: Callable[[str], ModuleType], site: Path, line: str, told: str
) -> None:
    (site / "c.html").write_text(line)
    (problem,) = script("check_site").problems_of(site)
    assert problem.startswith(told)


def test_a_style_sheet_that_fetches_is_named(script: Callable[[str], ModuleType], site: Path) -> None:
    (site / "_static/a.css").write_text("@font-face { src: url('https://fonts.example/f.woff2') }")
    (problem,) = script("check_site").problems_of(site)
    assert problem == "_static/a.css loads https://fonts.example/f.woff2 from elsewhere"


def test_an_empty_folder_is_no_site(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    assert script("check_site").problems_of(tmp_path) != []
