"""What this era uses of SGLang's HTTP contract: routes, request types and their fields.

SGLang ignores a field that it does not know, without a word, so nothing is sent that it does not list.
"""

from __future__ import annotations

ENGINE = "sglang"
DISTRIBUTIONS = ("sglang",)

UPDATE_ROUTE = "/update_weights_from_tensor"
PAUSE_ROUTE = "/pause_generation"
CONTINUE_ROUTE = "/continue_generation"
FLUSH_ROUTE = "/flush_cache"
VERSION_ROUTE = "/update_weight_version"
GENERATE_ROUTE = "/generate"
MODEL_INFO_ROUTE = "/model_info"
SERVER_INFO_ROUTE = "/server_info"
OPENAPI_ROUTE = "/openapi.json"

BEGIN_UPDATE_ROUTE = "/begin_weight_update"
"""Since 0.5.21 an update outside of a session that this route opens is refused."""
END_UPDATE_ROUTE = "/end_weight_update"

ROUTES_USED = (
    UPDATE_ROUTE,
    PAUSE_ROUTE,
    CONTINUE_ROUTE,
    FLUSH_ROUTE,
    VERSION_ROUTE,
    GENERATE_ROUTE,
    MODEL_INFO_ROUTE,
    SERVER_INFO_ROUTE,
)

BEGIN_REQUEST = "BeginWeightUpdateReqInput"
UPDATE_REQUEST = "UpdateWeightsFromTensorReqInput"
PAUSE_REQUEST = "PauseGenerationReqInput"
VERSION_REQUEST = "UpdateWeightVersionReqInput"

PAYLOAD_FIELD = "serialized_named_tensors"
VERSION_FIELD = "new_version"
SELECTOR_FIELD = "selector"
TARGET_MODEL = "target"
"""What the selector calls the model that is served, as opposed to its drafter."""

FIELDS_USED: dict[str, tuple[str, ...]] = {
    UPDATE_REQUEST: (PAYLOAD_FIELD, "load_format", "flush_cache", "abort_all_requests"),
    PAUSE_REQUEST: ("mode",),
    VERSION_REQUEST: (VERSION_FIELD, "abort_all_requests"),
    FLUSH_ROUTE: ("timeout",),
}
"""Per request type, or per route for query parameters, the fields that a sync sends."""

SESSION_FIELDS_USED: dict[str, tuple[str, ...]] = {
    **FIELDS_USED,
    BEGIN_REQUEST: (SELECTOR_FIELD,),
    UPDATE_REQUEST: (*FIELDS_USED[UPDATE_REQUEST], SELECTOR_FIELD),
}
SESSION_ROUTES_USED = (*ROUTES_USED, BEGIN_UPDATE_ROUTE, END_UPDATE_ROUTE)
"""The same where updates need a session."""

LAUNCH_ARGUMENTS_READ = (
    "dtype",
    "load_format",
    "speculative_algorithm",
    "weight_cache_mode",
    "enable_lora",
    "max_lora_rank",
    "lora_target_modules",
    "max_loras_per_batch",
    "max_loaded_loras",
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_dp_attention",
    "disable_radix_cache",
    "custom_weight_loader",
    "attention_backend",
    "moe_runner_backend",
)
"""Of the server's several hundred arguments, those that a plan depends on or shows."""
