"""SGLang's own request objects, made from the fields that a program lists; an `Engine` takes nothing else.

One builder serves updates of the base, adapters and everything around them. Fields are those of the request
class itself, a dataclass before 0.5.15 and a msgspec struct since, and are given by keyword alone: the struct
cannot be made by position. Nothing is left out and nothing is ignored, as HTTP would.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError, near_names

if TYPE_CHECKING:
    from collections.abc import Mapping

STRUCTS = "sglang.srt.managers.io_struct"


class RequestClasses:
    """The request classes of one SGLang.

    Args:
        structs: the module that holds them.
        version: of SGLang, for errors.
    """

    def __init__(self, structs: Any, version: str) -> None:
        self._structs = structs
        self._version = version

    def __contains__(self, name: str) -> bool:
        return isinstance(getattr(self._structs, name, None), type)

    def fields(self, name: str) -> tuple[str, ...]:
        """Names of the fields of one class, in its order.

        Raises:
            EngineError: there is no such class, or it is neither a dataclass nor a msgspec struct.
        """
        found = getattr(self._structs, name, None)
        if isinstance(found, type):
            listed = getattr(found, "__struct_fields__", None)
            if listed is not None:
                return tuple(listed)
            if dataclasses.is_dataclass(found):
                return tuple(field.name for field in dataclasses.fields(found))
        kind = f"is a {type(found).__name__} of an unknown shape" if found is not None else "is not there"
        raise EngineError(
            f"{name} of SGLang {self._version} {kind}.",
            "Requests are made from a class with listed fields: a dataclass, or a msgspec struct.",
            "Use SGLang 0.5.8 to 0.5.23.",
        )

    def build(self, name: str, values: Mapping[str, object]) -> Any:
        """One request with exactly these fields; the others keep their defaults.

        Raises:
            EngineError: the class does not list one of them, or wants one that is not given; says which
                fields it has.
        """
        listed = self.fields(name)
        unknown = [field for field in values if field not in listed]
        if unknown:
            near = {field: near_names(field, listed) for field in unknown}
            told = "; ".join(
                f"{field} (near it: {', '.join(names)})" if names else field for field, names in near.items()
            )
            raise EngineError(
                f"{name} of SGLang {self._version} has no field {told}.",
                f"Its fields are {', '.join(listed) or 'none'}.",
                "Use SGLang 0.5.8 to 0.5.23.",
            )
        try:
            return getattr(self._structs, name)(**values)
        except TypeError as error:
            raise EngineError(
                f"{name} of SGLang {self._version} cannot be made from {', '.join(values) or 'nothing'}: "
                f"{error}.",
                f"Its fields are {', '.join(listed) or 'none'}.",
                "Use SGLang 0.5.8 to 0.5.23.",
            ) from error
