"""The cases of two ranks without adapters, and the rules of an export; see `fsdp_cases`, `fsdp_special`."""

from __future__ import annotations

from case_running import run
from fsdp_adapters import ADAPTERS, NORMAL
from fsdp_cases import full_cases
from fsdp_offloading import OFFLOADING, STAGING
from fsdp_quantised import QUANTISED
from fsdp_special import SPECIAL
from fsdp_wrappers import WRAPPERS

VALUES = full_cases(WRAPPERS)

if __name__ == "__main__":
    run({**SPECIAL, **OFFLOADING, **STAGING, **ADAPTERS, **NORMAL, **QUANTISED, **VALUES})
