"""Facts of an installed SGLang from its source text: importing it takes long and needs its kernels."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.facts import EngineFacts
from weightlane.installations import find_distribution
from weightlane_sglang.adapter_contract import ADAPTER_FIELDS_USED
from weightlane_sglang.contract import (
    COLLECTIVE_FIELDS_USED,
    ENGINE,
    MEMORY_FIELDS_USED,
    SESSION_FIELDS_USED,
)
from weightlane_sglang.loader_name import PLUGIN_DISTRIBUTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOADER_QUESTION = "weightlane_sglang.weight_loader:answer"
"""Whether the environment that holds SGLang also holds our code for it, as an attribute of facts."""

_STRUCTS = "sglang/srt/managers/io_struct.py"
_SERVER = "sglang/srt/entrypoints/http_server.py"
_VERBS = frozenset({"get", "post", "put", "delete", "api_route"})


def installed_facts(distributions: Sequence[str], search_path: Sequence[str] = ()) -> EngineFacts | None:
    """Facts of the first installed distribution of `distributions`; None when there is none.

    `search_path` names the folders of another environment. Sources that cannot be found (an editable install)
    give a version alone, which no probe takes for proof.
    """
    found = find_distribution(distributions, search_path)
    if found is None:
        return None
    routes, fields = read_sources(Path(str(found.locate_file(""))))
    return EngineFacts(
        engine=ENGINE,
        version=found.version,
        source="installed",
        attributes={LOADER_QUESTION: find_distribution((PLUGIN_DISTRIBUTION,), search_path) is not None},
        request_fields=fields,
        routes=routes,
    )


def read_sources(root: Path) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(routes, fields) as `read_openapi` gives them, from the package below `root`."""
    fields: dict[str, tuple[str, ...]] = {}
    structs = root / _STRUCTS
    if structs.is_file():
        classes = {node.name: node for node in _parsed(structs).body if isinstance(node, ast.ClassDef)}
        asked = (*SESSION_FIELDS_USED, *MEMORY_FIELDS_USED, *COLLECTIVE_FIELDS_USED, *ADAPTER_FIELDS_USED)
        for request in asked:
            if request in classes:
                fields[request] = tuple(dict.fromkeys(_fields(request, classes)))
    routes: set[str] = set()
    server = root / _SERVER
    if server.is_file():
        for node in _parsed(server).body:
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                served = tuple(_routes(node))
                routes.update(served)
                for route in served:
                    if route in SESSION_FIELDS_USED:
                        fields[route] = tuple(argument.arg for argument in node.args.args)
    return tuple(sorted(routes)), fields


def _parsed(source: Path) -> ast.Module:
    return ast.parse(source.read_text(encoding="utf-8"), filename=str(source))


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(base.id, classes)
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _routes(function: ast.AsyncFunctionDef | ast.FunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and isinstance(decorator.func, ast.Attribute)
            and decorator.func.attr in _VERBS
            and decorator.args
            and isinstance(decorator.args[0], ast.Constant)
            and isinstance(decorator.args[0].value, str)
        ):
            yield decorator.args[0].value
