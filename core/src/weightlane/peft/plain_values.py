"""A configuration's fields as plain data, which JSON can hold, whatever object they came on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def fields_of(config: object) -> dict[str, Any]:
    """The fields of a configuration object, or of a mapping, by name; private ones are left out.

    An object is asked for its attributes: `to_dict` of some peft releases fails on their own fields (0.19.1
    on `use_bdlora`), and a mapping that was made by it is taken as it is. Values are as `plain` makes them.

    Raises:
        TypeError: it is neither, and has no attributes.
    """
    found = config if isinstance(config, Mapping) else vars(config)
    return {str(key): plain(value) for key, value in found.items() if not str(key).startswith("_")}


def plain(value: Any) -> Any:
    """Enums as their values, sets as sorted lists, tuples as lists, nested configurations as mappings.

    What is none of these and no JSON value is told by its type's name: that something is there is not lost,
    and every rank says the same, which a `repr` with an address would not.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((plain(item) for item in value), key=lambda item: (type(item).__name__, item))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return f"<{type(value).__name__}>"
