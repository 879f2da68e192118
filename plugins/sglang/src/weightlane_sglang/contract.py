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
MODEL_INFO_ROUTES = (MODEL_INFO_ROUTE, "/get_model_info")
SERVER_INFO_ROUTES = (SERVER_INFO_ROUTE, "/get_server_info")
"""Newest first; the others are all that there is before 0.5.6, and error bodies later."""
OPENAPI_ROUTE = "/openapi.json"

BEGIN_UPDATE_ROUTE = "/begin_weight_update"
"""Since 0.5.21 an update outside of a session that this route opens is refused."""
END_UPDATE_ROUTE = "/end_weight_update"

ENCODES = "/model_info:has_image_understanding or has_audio_understanding"
"""A fact: the model has encoders, whose outputs SGLang keeps by the input's hash."""
ENCODER_CACHE_VARIABLE = "SGLANG_VLM_CACHE_SIZE_MB"
"""Of the server: how much of that it keeps (`MultiModalStaticCache`). `/flush_cache` empties none of it (read
in 0.5.18 and 0.5.23), and no other route does; with 0 nothing is kept."""

DISTRIBUTED_ROUTE = "/update_weights_from_distributed"
INIT_GROUP_ROUTE = "/init_weights_update_group"
DESTROY_GROUP_ROUTE = "/destroy_weights_update_group"
RELEASE_ROUTE = "/release_memory_occupation"
RESUME_ROUTE = "/resume_memory_occupation"
"""These five are asked for by lanes that were told to use them; no probe wants them."""

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

DISTRIBUTED_REQUEST = "UpdateWeightsFromDistributedReqInput"
INIT_GROUP_REQUEST = "InitWeightsUpdateGroupReqInput"
DESTROY_GROUP_REQUEST = "DestroyWeightsUpdateGroupReqInput"
RELEASE_REQUEST = "ReleaseMemoryOccupationReqInput"
RESUME_REQUEST = "ResumeMemoryOccupationReqInput"

TAGS_FIELD = "tags"
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
UNTIMED_FIELDS_USED: dict[str, tuple[str, ...]] = {
    UPDATE_REQUEST: FIELDS_USED[UPDATE_REQUEST],
    VERSION_REQUEST: FIELDS_USED[VERSION_REQUEST],
}
UNTIMED_ROUTES_USED = (
    UPDATE_ROUTE,
    PAUSE_ROUTE,
    CONTINUE_ROUTE,
    FLUSH_ROUTE,
    VERSION_ROUTE,
    GENERATE_ROUTE,
)
"""The same before 0.5.10, where a flush takes no time to wait; before 0.5.6 a pause takes nothing at all."""
MEMORY_FIELDS_USED = {RELEASE_REQUEST: (TAGS_FIELD,), RESUME_REQUEST: (TAGS_FIELD,)}
"""What a lane that manages memory sends besides."""
ANNOUNCED_FIELDS = ("names", "dtypes", "shapes", "group_name")
GROUP_FIELDS = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
COLLECTIVE_FIELDS_USED: dict[str, tuple[str, ...]] = {
    DISTRIBUTED_REQUEST: (*ANNOUNCED_FIELDS, "flush_cache", "abort_all_requests"),
    INIT_GROUP_REQUEST: GROUP_FIELDS,
    DESTROY_GROUP_REQUEST: ("group_name",),
}
"""What transport `collective` sends besides."""
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
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "attention_backend",
    "moe_runner_backend",
    "offload_group_size",
    "kt_weight_path",
    "torchao_config",
    "modelopt_quant",
    "tokenizer_worker_num",
    "json_model_override_args",
)
"""Of the server's several hundred arguments, those that a plan depends on or shows."""
