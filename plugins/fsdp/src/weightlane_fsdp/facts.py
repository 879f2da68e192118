"""Facts of the installed torch, read without importing it: where it keeps DTensor and FSDP2."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from weightlane.facts import EngineFacts
from weightlane.installations import find_distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE = "fsdp"
DISTRIBUTIONS = ("torch",)

PUBLIC_FSDP2 = "torch.distributed.fsdp._fully_shard:FSDPParam"
"""FSDP2 and DTensor are public (2.6 and newer); before, they are `_composable.fsdp` and `_tensor`."""

COMPOSABLE_FSDP2 = "torch.distributed._composable.fsdp:FSDPParam"

SHARD_RECORD = "torch.distributed.fsdp._fully_shard:FSDPParam.sharded_param"
"""FSDP2 remembers a parameter's shard also while it is gathered."""

FLAT_RECORD = "torch.distributed.fsdp:FlatParameter._numels_with_padding"
"""FSDP1 remembers where in its flat parameter each original one lies."""

_QUESTIONS: dict[str, tuple[str, str, str]] = {
    PUBLIC_FSDP2: ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "FSDPParam", ""),
    COMPOSABLE_FSDP2: ("torch/distributed/_composable/fsdp/_fsdp_param.py", "FSDPParam", ""),
    SHARD_RECORD: ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "FSDPParam", "sharded_param"),
    FLAT_RECORD: ("torch/distributed/fsdp/_flat_param.py", "FlatParameter", "_numels_with_padding"),
}


def installed_facts(search_path: Sequence[str] = ()) -> EngineFacts | None:
    """Facts of the installed torch; None where there is none.

    A question whose folder is not at hand stays unasked; a file that a torch lacks is a no.
    """
    found = find_distribution(DISTRIBUTIONS, search_path)
    if found is None:
        return None
    root = Path(str(found.locate_file("")))
    answers = {}
    if (root / "torch/distributed").is_dir():
        answers = {key: _ask(root / file, owner, member) for key, (file, owner, member) in _QUESTIONS.items()}
    return EngineFacts(engine=ENGINE, version=found.version, source="installed", attributes=answers)


def _ask(file: Path, owner: str, member: str) -> bool:
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            return not member or any(_defines(item, member) for item in node.body)
    return False


def _defines(node: ast.stmt, member: str) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == member
    return isinstance(node, ast.FunctionDef) and node.name == member
