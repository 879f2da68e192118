"""What loading adapters uses of SGLang's HTTP contract: its shapes by era, told from the listed fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightlane.errors import PlanError, Problem

if TYPE_CHECKING:
    from weightlane.facts import EngineFacts

LOAD_ROUTE = "/load_lora_adapter_from_tensors"
UNLOAD_ROUTE = "/unload_lora_adapter"
MODELS_ROUTE = "/v1/models"
"""Lists the adapters that are loaded, each with the served model for its parent."""

LOAD_REQUEST = "LoadLoRAAdapterFromTensorsReqInput"
UNLOAD_REQUEST = "UnloadLoRAAdapterReqInput"
NAME_FIELD = "lora_name"
CONFIG_FIELD = "config_dict"

ONE_FOR_ALL = "serialized_tensors"
"""0.5.8 to 0.5.16: one text, which the server hands to every rank."""
ONE_PER_RANK = "serialized_named_tensors"
"""Since 0.5.17: a list, of which each rank reads the entry of its own number; it dies where there is none."""

ADAPTER_FIELDS_USED: dict[str, tuple[str, ...]] = {
    LOAD_REQUEST: (NAME_FIELD, CONFIG_FIELD),
    UNLOAD_REQUEST: (NAME_FIELD,),
}
ADAPTER_ROUTES_USED = (LOAD_ROUTE, UNLOAD_ROUTE, MODELS_ROUTE)


class LoadShape(NamedTuple):
    """The field that carries the tensors, and how many payloads its list holds; 0 where it is no list."""

    payload_field: str
    copies: int


def load_shape(facts: EngineFacts) -> LoadShape:
    """How this server is handed an adapter's tensors.

    Told from the fields of its own request type and never from its version: the field was renamed, and its
    type changed with it. A field that is not listed would be ignored with status 200.

    Raises:
        PlanError: the server has no such request, or one of a shape that is not known; lists what was found.
    """
    listed = facts.request_fields.get(LOAD_REQUEST, ())
    found = [field for field in (ONE_FOR_ALL, ONE_PER_RANK) if field in listed]
    missing = [field for field in ADAPTER_FIELDS_USED[LOAD_REQUEST] if field not in listed]
    if len(found) != 1 or missing:
        needed = f"{NAME_FIELD}, {CONFIG_FIELD} and either {ONE_FOR_ALL} or {ONE_PER_RANK}"
        what = f"SGLang {facts.version} lists the fields {', '.join(listed) or 'none'}; {needed} are known"
        fix = "Use SGLang 0.5.8 to 0.5.23, or mode merged."
        raise PlanError([Problem("unknown-shape", LOAD_REQUEST, what, fix)])
    return LoadShape(found[0], facts.parallel.tensor if found[0] == ONE_PER_RANK else 0)
