"""How `plan` and `explain` are told of a receiver: a live engine, or one that does not run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from weightlane.cli.built_tables import kept_or_traced, traced_anew

if TYPE_CHECKING:
    from weightlane.cli.built_tables import TablesOf

Engine = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="Rollout engine, such as vllm; none needs to run.")
]
To = Annotated[
    str, typer.Option("--to", metavar="ADDRESS", help="A live engine: unix:/PATH, tcp:HOST:PORT or a URL.")
]
TensorParallel = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor-parallel workers; of --engine alone.")
]
Lora = Annotated[bool, typer.Option("--lora", help="The engine would run with LoRA on; of --engine alone.")]
Model = Annotated[
    Optional[Path],  # noqa: UP045 - evaluated where typer reads it
    typer.Option("--model", metavar="DIR", help="Checkpoint folder: config.json, and weights or not."),
]
Architecture = Annotated[
    str, typer.Option("--arch", metavar="NAME", help="Architecture, to answer from its snapshot alone.")
]


Fresh = Annotated[
    bool, typer.Option("--fresh", help="Build the engine's model anew, though tables of it are kept.")
]


def tables_of(to: str, *, fresh: bool) -> TablesOf:
    """How the tables of a model that is built here are come by.

    Raises:
        BadParameter: a live engine is asked, which is wrong usage.
    """
    if fresh and to:
        raise typer.BadParameter("a live engine is always traced anew", param_hint="--fresh")
    return traced_anew if fresh else kept_or_traced


def require_one_receiver(engine: str, to: str, *, tensor_parallel: int, lora: bool) -> None:
    """Refuses options that name no receiver, or that a live engine answers itself.

    Raises:
        BadParameter: which is wrong usage.
    """
    if not engine and not to:
        raise typer.BadParameter("name a receiver: --to ADDRESS, or --engine NAME", param_hint="--engine")
    if to and (tensor_parallel != 1 or lora):
        raise typer.BadParameter("a live engine tells this itself", param_hint="--tp/--lora")
