"""vLLM's own way in: the entry point `weightlane` of group `vllm.general_plugins`.

vLLM calls it in every process that it runs, once in each (https://docs.vllm.ai/en/latest/design/plugin_system.html),
also for users who never heard of lanes: without the variable it does nothing, and imports nothing of ours.
"""

from __future__ import annotations

import os

FRONT_ADDRESS = "WEIGHTLANE_FRONT_ADDRESS"
"""Where the engine of a `vllm serve` is to be reached by lanes: `unix:/PATH` or `tcp:127.0.0.1:PORT`."""


def register() -> None:
    """Has a front opened beside the engine that this process makes, if the variable asks for one.

    Raises:
        EngineError: no front can listen on the address, or this vLLM offers no place for one. vLLM does not
            catch it, so that the server does not start.
    """
    address = os.environ.get(FRONT_ADDRESS, "")
    if address:
        from weightlane_vllm.server_patches import serve_beside

        serve_beside(address)
