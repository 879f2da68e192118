"""Plans how an engine must be started so that a lane can reach it; starts nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from weightlane.cli.addresses import is_taken, second_replica_note, taken_note
from weightlane.contexts import LaunchContext, LaunchPlan
from weightlane.errors import EngineError, SelectionError
from weightlane.front.address import KEY_VARIABLE
from weightlane.installations import find_distribution
from weightlane.pins import assume_variable
from weightlane.refusals import raise_no_candidate
from weightlane.selection import select
from weightlane.types import Capability, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.adapters import SwapPolicy
    from weightlane.registry import Registry, Selected
    from weightlane.types import MemoryTag

Device: TypeAlias = Literal["cpu", "gpu"]

NO_MODEL = "$MODEL"
"""What stands for the checkpoint folder while it is not known."""

_RECEIVE: dict[Capability, Mode] = {Capability(f"receive-{mode.value}"): mode for mode in Mode}


@dataclass(frozen=True, slots=True)
class LaunchWish:
    """What the user asked for; None, "" for `address` or 0 for `lora_rank`, where nothing was said."""

    engine: str
    mode: Mode
    model: Path | None
    tensor_parallel: int
    device: Device | None
    python: Path | None
    address: str
    swap: SwapPolicy = "two_slot"
    lora_rank: int = 0
    release: tuple[MemoryTag, ...] = ()


class Launch(msgspec.Struct, frozen=True):
    """How to start one engine: the document of `weightlane launch-args --json`.

    `command` is to be run as a list, with `environment` added to the caller's own. `model` is None while it
    is not known; the word `$MODEL` then stands for it in `command`. `rollout` is what reaches the engine once
    it runs. `facts_source` is "installed" where the engine was found, "assumed" where its version was stated.
    """

    engine: str
    engine_version: str
    facts_source: str
    backend: str
    era: str
    distribution: str
    evidence: tuple[str, ...]
    mode: Mode
    model: str | None
    tensor_parallel: int
    device: Device
    python: str
    command: tuple[str, ...]
    environment: dict[str, str]
    address: str
    rollout: str
    notes: tuple[str, ...]


def plan_engine_launch(registry: Registry, wish: LaunchWish) -> Launch:
    """Selects a backend for the engine where it is to run, and asks it how to start that engine.

    Raises:
        SelectionError: nobody registers the engine (near names are told), its version is not known, no
            backend fits it, or the chosen one cannot receive the mode.
        PluginError: the only plugin that serves the engine cannot be used.
        EngineError: the interpreter, the model folder or the engine's environment will not do.
        PlanError: the engine cannot be started so.
    """
    rivals = [
        item
        for item in registry.backends()
        if (item.descriptor.role, item.descriptor.engine) == ("rollout", wish.engine)
    ]
    if not rivals:
        raise_no_candidate(registry, "rollout", wish.engine, ())
    model = _checked_model(wish.model)
    folders = _folders(wish)
    facts = registry.collect_facts(wish.engine, search_path=folders)
    if not facts.version:
        raise _no_version(wish, rivals)
    selected = select(registry, "rollout", wish.engine, facts)
    _require_mode(selected, wish.mode)
    seen = facts.source != "assumed"
    device, notes = _device(wish, seen)
    context = LaunchContext(
        descriptor=selected.descriptor,
        facts=msgspec.structs.replace(facts, device=device),
        mode=wish.mode,
        model=model,
        tensor_parallel=wish.tensor_parallel,
        address=wish.address,
        swap=wish.swap,
        lora_rank=wish.lora_rank,
        release=wish.release,
    )
    plan = registry.call_plan_launch(selected, context)
    python = str(wish.python or (sys.executable if seen else "python"))
    if seen or wish.python:
        _require_distributions(plan, wish.engine, python, folders)
        notes += _other_versions(plan, python, folders)
    notes += _general_notes(context, plan, python)
    return Launch(
        engine=wish.engine,
        engine_version=facts.version,
        facts_source=facts.source,
        backend=selected.reference,
        era=selected.descriptor.era,
        distribution=f"{selected.distribution} {selected.version}".rstrip(),
        evidence=selected.evidence,
        mode=wish.mode,
        model=None if model == NO_MODEL else model,
        tensor_parallel=wish.tensor_parallel,
        device=device,
        python=python,
        command=(python, *plan.arguments),
        environment=dict(plan.environment),
        address=plan.address,
        rollout=f'wl.rollout("{wish.engine}", url="{plan.address}")' if plan.address else "",
        notes=(*selected.notes, *notes, *plan.notes),
    )


def _general_notes(context: LaunchContext, plan: LaunchPlan, python: str) -> tuple[str, ...]:
    notes: list[str] = []
    if python == "python":
        needs = " and ".join((context.descriptor.engine, *plan.requires))
        notes.append(f"Nothing of the engine was seen here: use the python of an environment with {needs}.")
    if context.model == NO_MODEL:
        notes.append(f"{NO_MODEL} stands for the folder of the checkpoint that the trainer begins from.")
    if is_taken(plan.address):
        notes.append(taken_note(plan.address))
    elif plan.address and not context.address:
        notes.append(second_replica_note(plan.address))
    if plan.address.startswith("tcp:"):
        notes.append(f"Set {KEY_VARIABLE} to the same secret for the engine and for the lane.")
    return tuple(notes)


def _checked_model(model: Path | None) -> str:
    if model is None:
        return NO_MODEL
    if not (model / "config.json").is_file():
        raise EngineError(
            f"--model {model} is not a checkpoint folder.",
            "It has no config.json here.",
            "Name a folder as save_pretrained writes it; where the engine sees other folders than this "
            "machine, leave --model out and fill it in there.",
        )
    return str(model.absolute())


def _folders(wish: LaunchWish) -> tuple[str, ...]:
    if wish.python is None:
        return ()
    from weightlane.demo.interpreter import import_folders

    return import_folders(wish.python, wish.engine, option="--python")


def _no_version(wish: LaunchWish, rivals: Sequence[Selected]) -> SelectionError:
    served = " or ".join(dict.fromkeys(f"{wish.engine} {item.descriptor.versions}" for item in rivals))
    where = f"in the environment of {wish.python}" if wish.python else "here"
    hints = [item.descriptor.install_hint for item in rivals if item.descriptor.install_hint]
    ways = [f"State its version in the environment: {assume_variable(wish.engine)}=VERSION"]
    ways += [] if wish.python else ["give --python, the interpreter of the environment that holds it"]
    ways += [f"install it: {hints[0]}"] if hints else []
    return SelectionError(
        f"{wish.engine} is not installed {where}, so its version is not known.",
        f"How it must be started depends on its version; registered backends serve {served}.",
        f"{', or '.join(ways)}.",
    )


def _require_mode(selected: Selected, mode: Mode) -> None:
    known = [_RECEIVE[item].value for item in selected.descriptor.capabilities if item in _RECEIVE]
    if mode.value in known:
        return
    raise SelectionError(
        f"{selected.origin} cannot receive mode {mode.value}.",
        f"It can receive: {', '.join(sorted(known)) or 'no mode at all'}.",
        f"Use --mode {min(known)}, or another engine." if known else "Use another engine.",
    )


def _device(wish: LaunchWish, seen: bool) -> tuple[Device, tuple[str, ...]]:
    """The device, and what there is to say about it. The engine's own torch is asked, where there is one."""
    if wish.device is not None:
        return wish.device, ()
    if not seen:
        return "gpu", (f"It is meant for a GPU, since no {wish.engine} is here to ask; --device cpu else.",)
    from weightlane.demo.interpreter import has_gpu

    try:
        found = has_gpu(wish.python or Path(sys.executable), wish.engine)
    except EngineError as error:
        raise EngineError(error.what, error.why, "Give --device cpu or --device gpu.") from error
    return ("gpu" if found else "cpu"), ()


def _require_distributions(plan: LaunchPlan, engine: str, python: str, folders: Sequence[str]) -> None:
    missing = [name for name in plan.requires if find_distribution([name], folders) is None]
    if missing:
        raise EngineError(
            f"The environment of {python} lacks {' and '.join(missing)}.",
            f"{engine} is started through it, so that a lane can reach it.",
            f"Run {python} -m pip install {' '.join(missing)}.",
        )


def _other_versions(plan: LaunchPlan, python: str, folders: Sequence[str]) -> tuple[str, ...]:
    """Both sides of a lane run our code; a difference is no error, but it is the first thing to look at."""
    notes: list[str] = []
    for name in plan.requires:
        there, here = find_distribution([name], folders), find_distribution([name])
        if there and here and there.version != here.version:
            notes.append(f"{python} has {name} {there.version}, and this environment {here.version}.")
    return tuple(notes)
