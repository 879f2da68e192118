"""The adapter's configuration, from the module inside all wrappers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from weightlane.torch_trainer.adapter import adapter_config
from weightlane_fsdp.tree import unwrapped

if TYPE_CHECKING:
    from weightlane.contexts import PeftConfigContext
    from weightlane.peft import AdapterConfig


def normalized(context: PeftConfigContext) -> AdapterConfig:
    """As for a plain module: peft keeps configurations on the model that it made, below every wrapper."""
    export = replace(context.export, model=unwrapped(context.export.model))
    return adapter_config(replace(context, export=export))
