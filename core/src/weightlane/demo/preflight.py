"""What can be told to be wrong before anything is started."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from weightlane.errors import EngineError, SelectionError, UsageError, near_names
from weightlane.lock_check import require_possible
from weightlane.refusals import raise_no_candidate
from weightlane.registry import get_registry
from weightlane.selection import select
from weightlane.types import Capability, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weightlane.demo.settings import DemoSettings
    from weightlane.types import BackendDescriptor

MODELS = ("torch", "fsdp")
"""Trainers for which the demo knows how to make a model."""

_PACKAGES = ("torch", "transformers", "matplotlib", "jinja2")


def check_settings(settings: DemoSettings) -> None:
    """Raises for whatever cannot work, before a process is started.

    Raises:
        WeightlaneError: contradictory options, a missing package, folder or interpreter, a trainer or an
            engine that nobody registers, a mode that one of them lacks, or a lock that the run would break.
    """
    _check_packages(_PACKAGES)
    _check_options(settings)
    mode = _mode(settings.mode)
    if mode is not Mode.FULL:
        _check_packages(("peft",))
    trainer = _trainer(settings.trainer)
    _require_any([trainer], f"export-{mode.value}", mode)
    _require_any(_rollouts(settings.rollout), f"receive-{mode.value}", mode)
    _check_report(settings.report)


def _check_packages(needed: Sequence[str]) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineError(
            f"The demo needs {' and '.join(missing)}, which this environment lacks.",
            "They come with the extra `demo`.",
            'Run pip install "weightlane[demo]".',
        )


def _check_options(settings: DemoSettings) -> None:
    if settings.url and settings.rollout_python:
        raise UsageError(
            "--url and --rollout-python exclude each other.",
            "One names an engine that runs already, the other where to start one.",
            "Leave one out.",
        )
    if settings.url and settings.model is None:
        raise UsageError(
            f"--url {settings.url} needs --model.",
            "The trainer begins from the checkpoint that the running engine was started from.",
            "Give its folder.",
        )
    if not settings.url and settings.rollout in {"vllm", "sglang"} and settings.rollout_python is None:
        raise UsageError(
            f"--rollout {settings.rollout} needs --rollout-python or --url.",
            f"{settings.rollout} lives in an environment of its own, since it pins its own torch.",
            f"Give the interpreter of an environment that holds {settings.rollout}.",
        )
    if settings.rollout_python and not settings.rollout_python.is_file():
        raise EngineError(
            f"--rollout-python {settings.rollout_python} is not a file.", fix="Name an interpreter."
        )
    if settings.model and not (settings.model / "config.json").is_file():
        raise EngineError(
            f"--model {settings.model} is not a checkpoint folder.",
            "It has no config.json.",
            "Name a folder as save_pretrained writes it, such as one of examples/smollm2.py.",
        )


def _mode(name: str) -> Mode:
    try:
        return Mode(name)
    except ValueError:
        known = [mode.value for mode in Mode]
        raise UsageError(
            f"There is no mode {name!r}.",
            f"Modes are {', '.join(known)}.",
            f"Near: {', '.join(near_names(name, known)) or 'none'}.",
        ) from None


def _trainer(name: str) -> BackendDescriptor:
    registry = get_registry()
    selected = select(registry, "trainer", name, registry.collect_facts(name))
    if name not in MODELS:
        raise SelectionError(
            f"The demo cannot make a model for trainer {name} yet.",
            f"It can for {', '.join(MODELS)}.",
            f"Use --trainer {(near_names(name, MODELS) or MODELS)[0]}.",
        )
    return selected.descriptor


def _rollouts(name: str) -> list[BackendDescriptor]:
    """Every era registered for the engine: which one serves it is known once it runs."""
    registry = get_registry()
    found = [
        item.descriptor
        for item in registry.backends()
        if item.descriptor.role == "rollout" and item.descriptor.engine == name
    ]
    if not found:
        raise_no_candidate(registry, "rollout", name, ())
    held = registry.locks.held
    if held is not None:
        require_possible(held, registry, "rollout", name)
    return found


def _require_any(eras: Sequence[BackendDescriptor], capability: str, mode: Mode) -> None:
    if any(Capability(capability) in era.capabilities for era in eras):
        return
    known = {item.value for era in eras for item in era.capabilities}
    raise SelectionError(
        f"{eras[0].role.capitalize()} backend {eras[0].name} does not know mode {mode.value}.",
        f"It can: {', '.join(sorted(known))}.",
        "Use --mode full.",
    )


def _check_report(report: Path) -> None:
    folder = report.absolute().parent
    if not folder.is_dir() or report.is_dir():
        raise EngineError(
            f"The report cannot be written to {report}.",
            f"{folder} is not a folder." if not folder.is_dir() else "It is a folder.",
            "Give --report the path of a file.",
        )
