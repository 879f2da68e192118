# ruff: noqa: INP001 - a folder of pages, no package
"""The site. `make docs` builds it: warnings are errors, and nothing is fetched, neither then nor when read.

What can be read from the code is written to `_generated/` first: the support matrix, the command line
reference and the words of selection.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from command_reference import command_pages  # noqa: E402
from measured_tables import export_table, gpu_table, tracing_table, versions_table  # noqa: E402
from selection_words import SCENES  # noqa: E402
from sphinx.ext.napoleon import GoogleDocstring  # noqa: E402
from support_matrix import installed_registry, matrix_page, matrix_rows  # noqa: E402

from weightlane import __version__  # noqa: E402
from weightlane.cli.app import app as commands  # noqa: E402

if TYPE_CHECKING:
    from docutils.nodes import Element
    from sphinx.application import Sphinx

project = "weightlane"
version = release = __version__
extensions = ["sphinx.ext.autodoc"]
exclude_patterns = ["_build", "_generated", "examples"]
default_role = "literal"  # as in the docstrings: `name` is code
smartquotes = False  # --model is an option, not a dash
nitpicky = True  # a reference that somebody wrote must lead somewhere
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
autodoc_default_options = {"exclude-members": "__init__, __new__"}  # nobody makes a Lane by hand

html_theme = "furo"  # its scripts, styles and icons are files of the site; it loads no fonts
html_title = f"weightlane {version}"
html_static_path = ["_static"]
html_css_files = ["weightlane.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}

_generated = {
    "support_matrix.rst": matrix_page(matrix_rows(installed_registry())),
    "export_costs.rst": export_table(),
    "gpu_costs.rst": gpu_table(),
    "tracing_costs.rst": tracing_table(),
    "sglang_versions.rst": versions_table(),
    "command_reference.rst": command_pages(commands, "weightlane"),
    **{f"selection-{name}.txt": scene.words() for name, scene in SCENES.items()},
}
(HERE / "_generated").mkdir(exist_ok=True)
for _name, _text in _generated.items():
    (HERE / "_generated" / _name).write_text(_text, encoding="utf-8")


def _leave_unlinked(app: object, env: object, node: Element, text: Element) -> Element | None:
    """A type in a signature needs no page of its own; a role that somebody wrote does.

    Sphinx warns of neither alone: what a role makes has the attribute `refwarn`, what a signature makes not.
    """
    del app, env
    return None if "refwarn" in node else text


def _read_google_style(
    app: object, what: str, name: str, described: object, options: object, lines: list[str]
) -> None:
    """Turns `Args:` and `Raises:` into fields.

    Not by sphinx.ext.napoleon as an extension: it takes an attribute's "On rank 0: ..." for a type.
    """
    del app, options
    if what not in {"attribute", "data", "property"}:
        lines[:] = GoogleDocstring(list(lines), what=what, name=name, obj=described).lines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _read_google_style)
    app.connect("missing-reference", _leave_unlinked)
