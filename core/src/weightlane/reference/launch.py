"""How the reference engine is started behind a front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.adapters import SLOTS_NEEDED
from weightlane.contexts import LaunchPlan
from weightlane.errors import PlanError, Problem
from weightlane.front.address import address_problems
from weightlane.front.socket_folder import proposed_address
from weightlane.types import Mode

if TYPE_CHECKING:
    from weightlane.contexts import LaunchContext

ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
"""The model is a folder: nothing is to be looked up for it."""


def server_arguments(model: str, address: str, *, device: str, adapter_slots: int = 0) -> tuple[str, ...]:
    """Arguments for the interpreter of an environment that holds weightlane and transformers.

    Args:
        model: a checkpoint folder.
        address: where its front listens.
        device: a torch device.
        adapter_slots: adapters that it is to hold at once; 0 sets no limit.
    """
    server = ("-m", "weightlane.reference.server")
    slots = ("--adapter-slots", str(adapter_slots)) if adapter_slots else ()
    return (*server, "--model", model, "--address", address, "--device", device, *slots)


def plan_launch(context: LaunchContext) -> LaunchPlan:
    """The engine's server on one worker; in float32, so that log-probs can be compared.

    Raises:
        PlanError: more than one worker, or an address on which no front can listen.
    """
    problems: list[Problem] = []
    if context.tensor_parallel != 1:
        what = f"the reference engine runs on one worker, and {context.tensor_parallel} were asked for"
        problems.append(
            Problem("capability", "tensor_parallel", what, "Use tensor_parallel=1, or another engine.")
        )
    address = context.address or proposed_address(context.descriptor.engine)
    problems += address_problems(address)
    if problems:
        raise PlanError(problems)
    device = "cuda" if context.facts.device == "gpu" else "cpu"
    slots = SLOTS_NEEDED[context.swap] if context.mode is Mode.ADAPTER else 0
    told = f"{slots} adapter slot{'' if slots == 1 else 's'}: what one lane with swap {context.swap} needs"
    return LaunchPlan(
        arguments=server_arguments(context.model, address, device=device, adapter_slots=slots),
        notes=(told,) if slots else (),
        environment=ENVIRONMENT,
        address=address,
        requires=("weightlane",),
    )
