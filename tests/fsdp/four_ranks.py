"""The cases of four ranks: meshes of two dimensions."""

from __future__ import annotations

import tiny_models
from case_running import run
from fsdp_cases import adapter_cases, full_cases
from fsdp_wrappers import FOUR_RANKS

CASES = {
    **full_cases(FOUR_RANKS, {"even": tiny_models.even}),
    **full_cases(
        {name: wrap for name, wrap in FOUR_RANKS.items() if "tp" not in name}, {"dense": tiny_models.dense}
    ),
    **adapter_cases(
        {name: wrap for name, wrap in FOUR_RANKS.items() if "tp" not in name}, {"dense": tiny_models.dense}
    ),
}

if __name__ == "__main__":
    run(CASES)
