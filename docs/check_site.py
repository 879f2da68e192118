#!/usr/bin/env python3
"""Checks a built site: every link inside it leads somewhere, and nothing is loaded from anywhere else.

`python docs/check_site.py docs/_build` prints what is wrong and ends with 1. Links to other sites are left
alone: checking them would need a network.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("object", "data"),
}
"""What a browser fetches by itself; `link` does too, for the relations below."""
LOADING_RELATIONS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
STYLE_FETCH = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])((?:https?:)?//[^'")\s]+)""")


class Page(HTMLParser):
    """What one page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = STYLE_FETCH.findall(text)
        self.anchors: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes note of one element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and "href" in values:
            relations = set(values.get("rel", "").split())
            (self.loads if relations & LOADING_RELATIONS else self.links).append(values["href"])
        self.loads += [values[name] for kind, name in LOADING if kind == tag and name in values]


def problems_of(site: Path) -> list[str]:
    """Every broken link and every outside asset, one sentence each; empty when all is well."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found: list[str] = [] if pages else [f"{site} holds no page"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for target in dict.fromkeys(page.loads):
            parts = urlsplit(target)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                found.append(f"{name} loads {target} from elsewhere")
            elif not (path.parent / unquote(parts.path)).exists():
                found.append(f"{name} loads {target}, which does not exist")
        for target in dict.fromkeys(page.links):
            broken = _broken(path, target, pages)
            if broken:
                found.append(f"{name} links to {target}: {broken}")
    for style in sorted(site.rglob("*.css")):
        outside = STYLE_FETCH.findall(style.read_text(encoding="utf-8"))
        found += [f"{style.relative_to(site)} loads {target} from elsewhere" for target in outside]
    return found


def _broken(path: Path, target: str, pages: dict[Path, Page]) -> str:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not goal.exists():
        return "there is no such file"
    page = pages.get(goal)
    fragment = unquote(parts.fragment)
    if page is not None and fragment and fragment not in page.anchors:
        return "the page has no such place"
    return ""


if __name__ == "__main__":
    wrong = problems_of(Path(sys.argv[1]))
    sys.stdout.write("\n".join(wrong or ["every link leads somewhere; all assets are local"]) + "\n")
    sys.exit(1 if wrong else 0)
