"""The page says that its plugin works as it stands. It is found, selected and synced to here."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

import weightlane.registry
from weightlane.loading import HOOKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def acme(docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installs the example as its pyproject.toml describes it, for a registry of this test's own."""
    folder = docs / "examples/acme"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"acme_weightlane-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    ((group, entries),) = project["entry-points"].items()
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(folder / "src"))
    monkeypatch.setattr(weightlane.registry, "_process_registry", None)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_weightlane"]:
        del sys.modules[name]


@pytest.mark.usefixtures("acme")
def test_the_lines_that_use_it_print_what_the_page_says(
    block: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = compile(block("contract.rst", "acme-sync"), "contract.rst", "exec")
    exec(code, {"__name__": "acme_sync"})  # noqa: S102 - the page's own lines are what is tested
    assert capsys.readouterr().out == block("contract.rst", "acme-output")


@pytest.mark.usefixtures("acme")
def test_a_tensor_that_the_engine_lacks_is_refused_with_its_near_name() -> None:
    import torch
    from acme_weightlane.engine import AcmeEngine

    import weightlane as wl

    engine = AcmeEngine({"up.weight": torch.zeros(2)})
    with pytest.raises(wl.errors.PlanError, match=r"upp\.weight.*Near: up\.weight"):
        wl.connect(
            trainer=wl.trainer("torch", model={"upp.weight": torch.ones(2)}),
            rollout=[wl.rollout("acme", engine=engine)],
        )
    assert engine.weights["up.weight"].tolist() == [0, 0]


def test_the_page_shows_every_file_of_it(docs: Path) -> None:
    page = (docs / "contract.rst").read_text()
    shown = set(re.findall(r"literalinclude:: examples/acme/(\S+)", page))
    files = {
        path.relative_to(docs / "examples/acme").as_posix()
        for path in (docs / "examples/acme").rglob("*")
        if path.is_file() and path.suffix in {".py", ".toml"} and path.stat().st_size > 100
    }
    assert shown == files


def test_the_page_tells_of_every_hook_where_and_when_it_is_called(docs: Path) -> None:
    table = (docs / "contract.rst").read_text().split("A whole plugin\n")[0]
    listed = re.findall(r"^   \* - \| :func:`~weightlane\.hookspecs\.(\w+)`$", table, re.MULTILINE)
    assert sorted(listed) == sorted(HOOKS)
