"""By which name our code enters a server, and what must be installed there for it."""

from __future__ import annotations

PLUGIN_DISTRIBUTION = "weightlane-sglang"

LOADER = "weightlane_sglang.weight_loader.answer"
"""What `--custom-weight-loader` must list, and the `load_format` of a request for it."""

LOADER_ARGUMENT = "custom_weight_loader"
LOADER_OPTION = "--custom-weight-loader"
LOADER_ARGUMENTS = (LOADER_OPTION, LOADER)
