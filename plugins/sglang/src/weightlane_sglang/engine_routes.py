"""What each route of SGLang's HTTP server does, done on the `TokenizerManager` of an `Engine`.

The server's own functions (`sglang/srt/entrypoints/http_server.py`) hand a request object to one method of it
and answer what that gives; so does this. A method that is not there is a route that is not served.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from weightlane.errors import EngineError
from weightlane_sglang.adapter_contract import (
    LOAD_REQUEST,
    LOAD_ROUTE,
    MODELS_ROUTE,
    UNLOAD_REQUEST,
    UNLOAD_ROUTE,
)
from weightlane_sglang.contract import (
    BEGIN_REQUEST,
    BEGIN_UPDATE_ROUTE,
    CONTINUE_ROUTE,
    DESTROY_GROUP_REQUEST,
    DESTROY_GROUP_ROUTE,
    DISTRIBUTED_REQUEST,
    DISTRIBUTED_ROUTE,
    END_UPDATE_ROUTE,
    FLUSH_ROUTE,
    GENERATE_ROUTE,
    INIT_GROUP_REQUEST,
    INIT_GROUP_ROUTE,
    MODEL_INFO_ROUTE,
    PAUSE_REQUEST,
    PAUSE_ROUTE,
    RELEASE_REQUEST,
    RELEASE_ROUTE,
    RESUME_REQUEST,
    RESUME_ROUTE,
    SERVER_INFO_ROUTE,
    UPDATE_REQUEST,
    UPDATE_ROUTE,
    VERSION_REQUEST,
    VERSION_ROUTE,
)
from weightlane_sglang.engine_facts import loaded_models, model_info, server_info
from weightlane_sglang.probes import FLUSH_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightlane_sglang.engine_requests import RequestClasses

_GENERATE_REQUEST = "GenerateReqInput"
_FLUSH_SECONDS = "timeout_s"
"""What the flush of the engine calls the query parameter of the server's."""


class _Method(NamedTuple):
    """The request class and the method that takes it."""

    request: str
    name: str


_METHODS = {
    UPDATE_ROUTE: _Method(UPDATE_REQUEST, "update_weights_from_tensor"),
    DISTRIBUTED_ROUTE: _Method(DISTRIBUTED_REQUEST, "update_weights_from_distributed"),
    INIT_GROUP_ROUTE: _Method(INIT_GROUP_REQUEST, "init_weights_update_group"),
    DESTROY_GROUP_ROUTE: _Method(DESTROY_GROUP_REQUEST, "destroy_weights_update_group"),
    BEGIN_UPDATE_ROUTE: _Method(BEGIN_REQUEST, "begin_weight_update"),
    END_UPDATE_ROUTE: _Method("EndWeightUpdateReqInput", "end_weight_update"),
    PAUSE_ROUTE: _Method(PAUSE_REQUEST, "pause_generation"),
    CONTINUE_ROUTE: _Method("ContinueGenerationReqInput", "continue_generation"),
    RELEASE_ROUTE: _Method(RELEASE_REQUEST, "release_memory_occupation"),
    RESUME_ROUTE: _Method(RESUME_REQUEST, "resume_memory_occupation"),
    LOAD_ROUTE: _Method(LOAD_REQUEST, "load_lora_adapter_from_tensors"),
    UNLOAD_ROUTE: _Method(UNLOAD_REQUEST, "unload_lora_adapter"),
    GENERATE_ROUTE: _Method(_GENERATE_REQUEST, "generate_request"),
}
_VERSION_METHODS = ("update_weight_version", "_update_weight_version_if_provided")
"""The first since 0.5.21 takes the request, the second, of every version, the text."""


class EngineRoutes:
    """The routes of one engine.

    Args:
        engine: an `sgl.Engine`.
        classes: its request classes.
        version: of SGLang.
    """

    def __init__(self, engine: Any, classes: RequestClasses, version: str) -> None:
        self._manager = engine.tokenizer_manager
        self._classes = classes
        self._version = version

    def described(self) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
        """(routes, fields) as a server's description lists them, from methods and request classes."""
        found = [route for route, method in _METHODS.items() if hasattr(self._manager, method.name)]
        requests = [_METHODS[route].request for route in found]
        found += [MODEL_INFO_ROUTE, SERVER_INFO_ROUTE, MODELS_ROUTE]
        if VERSION_REQUEST in self._classes and any(
            hasattr(self._manager, name) for name in _VERSION_METHODS
        ):
            found.append(VERSION_ROUTE)
            requests.append(VERSION_REQUEST)
        fields = {name: self._classes.fields(name) for name in requests if name in self._classes}
        if hasattr(self._manager, "flush_cache"):
            found.append(FLUSH_ROUTE)
            if _FLUSH_SECONDS in inspect.signature(self._manager.flush_cache).parameters:
                fields[FLUSH_ROUTE] = (FLUSH_TIMEOUT,)
        return tuple(sorted(found)), fields

    async def answer(self, route: str, fields: Mapping[str, object]) -> Any:
        """What one request gives: an object with `success`, or anything that JSON can hold.

        Args:
            route: with a query where there is one.
            fields: of the request.

        Raises:
            EngineError: there is no such route here, or its request has another shape.
            Exception: whatever SGLang raises.
        """
        parts = urlsplit(route)
        if parts.path == FLUSH_ROUTE:
            return await self._flush(dict(parse_qsl(parts.query)))
        if parts.path == VERSION_ROUTE:
            return await self._publish(fields)
        if parts.path == SERVER_INFO_ROUTE:
            await self._manager.get_internal_state()  # answered by the schedulers: they live
            return server_info(self._manager, self._version)
        if parts.path == MODEL_INFO_ROUTE:
            return model_info(self._manager)
        if parts.path == MODELS_ROUTE:
            return loaded_models(self._manager)
        method = _METHODS.get(parts.path)
        if method is None or not hasattr(self._manager, method.name):
            raise self._not_served(parts.path)
        given = await self._given(method, fields)
        if isinstance(given, tuple) and len(given) == 2:
            success, message = given
            return {"success": success, "message": message}
        return _plain(given)

    async def _given(self, method: _Method, fields: Mapping[str, object]) -> Any:
        call = getattr(self._manager, method.name)
        if method.request not in self._classes and not fields and not inspect.signature(call).parameters:
            return await call()  # a pause or its end, before 0.5.6
        request = self._classes.build(method.request, fields)
        if inspect.isasyncgenfunction(call):
            return await anext(call(request))
        return await call(request)

    async def _flush(self, query: Mapping[str, str]) -> Any:
        if not query:
            return _plain(await self._manager.flush_cache())
        if list(query) != [FLUSH_TIMEOUT]:
            raise EngineError(f"A flush of an Engine takes {FLUSH_TIMEOUT} alone, not {', '.join(query)}.")
        given = await self._manager.flush_cache(**{_FLUSH_SECONDS: float(query[FLUSH_TIMEOUT])})
        return _plain(given)

    async def _publish(self, fields: Mapping[str, object]) -> Any:
        request = self._classes.build(VERSION_REQUEST, fields)
        if request.abort_all_requests:
            self._manager.abort_request(abort_all=True)
        newer, older = _VERSION_METHODS
        if hasattr(self._manager, newer):
            await getattr(self._manager, newer)(request)
        elif hasattr(self._manager, older):
            getattr(self._manager, older)(request.new_version)
        else:
            raise self._not_served(VERSION_ROUTE)
        return {"success": True, "message": ""}

    def _not_served(self, route: str) -> EngineError:
        served, _ = self.described()
        return EngineError(
            f"An Engine of SGLang {self._version} has nothing for {route}.",
            f"It has what {', '.join(served)} do.",
            "Use SGLang 0.5.8 to 0.5.23.",
        )


def _plain(given: Any) -> Any:
    """A reply of SGLang's own class as a mapping; anything else as it is."""
    listed = getattr(type(given), "__struct_fields__", None)
    if listed is None and dataclasses.is_dataclass(given) and not isinstance(given, type):
        listed = tuple(field.name for field in dataclasses.fields(given))
    if listed is None:
        return given
    return {name: getattr(given, name) for name in listed}


def as_json(answer: Any) -> bytes:
    """As the server would send it; what JSON has no word for, such as a path, as its text."""
    return msgspec.json.encode(answer, enc_hook=str)
