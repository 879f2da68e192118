"""Routes and request fields from a server's `/openapi.json`."""

from __future__ import annotations

import msgspec

from weightlane.errors import EngineError

_METHODS = frozenset({"get", "post", "put", "delete", "patch"})


class _Parameter(msgspec.Struct):
    name: str = ""


class _Operation(msgspec.Struct):
    parameters: list[_Parameter] = []


class _Schema(msgspec.Struct):
    properties: dict[str, msgspec.Raw] = {}


class _Components(msgspec.Struct):
    schemas: dict[str, _Schema] = {}


class _Document(msgspec.Struct):
    paths: dict[str, dict[str, msgspec.Raw]]
    components: _Components = msgspec.field(default_factory=_Components)


def read_openapi(document: bytes) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """(routes, fields): the paths served, and the field names of every request type.

    Query parameters are listed under their route, so that `fields["/flush_cache"]` may be `("timeout",)`.

    Raises:
        EngineError: the document is not an OpenAPI description.
    """
    try:
        parsed = msgspec.json.decode(document, type=_Document)
        fields = {name: tuple(schema.properties) for name, schema in parsed.components.schemas.items()}
        for route, operations in parsed.paths.items():
            names: dict[str, None] = {}
            for method, raw in operations.items():
                if method in _METHODS:
                    operation = msgspec.json.decode(raw, type=_Operation)
                    names.update((parameter.name, None) for parameter in operation.parameters)
            if names:
                fields[route] = tuple(names)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(
            f"/openapi.json is not an OpenAPI description: {error}.",
            "The address is that of another kind of server, or of a proxy.",
            "Give the address of the SGLang server itself.",
        ) from error
    return tuple(sorted(parsed.paths)), fields
