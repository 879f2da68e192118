"""Changes to vLLM that open a front beside an OpenAI server: for one that was asked for it, by environment.

Three methods are wrapped, none of which takes an argument. `ParallelConfig.__post_init__` sets the worker
extension, before any worker is made. `AsyncLLM._run_output_handler` is where the engine takes up its event
loop, and the front is opened. `OpenAIServingModels.init_static_loras` is the end of making the table of model
names, to which adapters are added.

To be removed when vLLM lets a plugin see the engine of its server: an endpoint plugin, which is made in that
process, is given no engine (vllm/plugins/endpoint_plugins/interface.py).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from weightlane.errors import EngineError
from weightlane.facts import EngineFacts
from weightlane.front.address import parse_address
from weightlane.probes import NotViable, ProbeResult, require_attributes
from weightlane_vllm.facts import ENGINE, WORKER_EXTENSION
from weightlane_vllm.general_plugin import FRONT_ADDRESS
from weightlane_vllm.opened_engine import WORKER_EXTENSION_CLASS
from weightlane_vllm.served_names import ServedNames

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

OUTPUT_HANDLER = "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler"
STATIC_LORAS = "vllm.entrypoints.openai.models.serving:OpenAIServingModels.init_static_loras"
_MODELS_MODULE = "vllm.entrypoints.openai.models.serving"


def probe_front_beside(facts: EngineFacts) -> ProbeResult:
    """Whether this vLLM has the places where a front is opened beside its server."""
    return require_attributes(facts, (WORKER_EXTENSION, OUTPUT_HANDLER))


class ServerPatches:
    """The wrapped methods of one process.

    Args:
        address: where the front will listen.
        open_front: opens it over an `AsyncLLM` in whose event loop it is called; must not wait.
    """

    def __init__(self, address: str, open_front: Callable[[Any, str, ServedNames], None]) -> None:
        self._address = address
        self._open_front = open_front
        self._names = ServedNames()
        self._engine: Any = None
        self._undo: list[tuple[type, str, Any]] = []

    def apply(self, parallel_config: type) -> None:
        """Wraps the first of the methods; the others follow where they are needed. Idempotent."""
        if not self._undo:
            self._wrap(parallel_config, "__post_init__", self._configured)

    def undo(self) -> None:
        """Puts back every method that was wrapped. Idempotent."""
        for owner, name, theirs in reversed(self._undo):
            setattr(owner, name, theirs)
        self._undo = []

    def _wrap(self, owner: type, name: str, after: Callable[[Any], None]) -> None:
        theirs = owner.__dict__[name]
        if any(item[:2] == (owner, name) for item in self._undo):
            return

        def wrapper(this: Any) -> None:
            theirs(this)
            after(this)

        self._undo.append((owner, name, theirs))
        setattr(owner, name, wrapper)

    def _configured(self, config: Any) -> None:
        """A configuration was made in this process, so that an engine may follow."""
        if config.worker_extension_cls not in ("", WORKER_EXTENSION_CLASS):
            raise EngineError(
                f"vLLM is to be started with --worker-extension-cls {config.worker_extension_cls}, and with "
                f"{FRONT_ADDRESS}.",
                "A worker takes one extension, and a lane needs weightlane's.",
                f"Leave one of them out; {WORKER_EXTENSION_CLASS} may be named.",
            )
        _require_one_server(config)
        config.worker_extension_cls = WORKER_EXTENSION_CLASS
        from vllm.v1.engine.async_llm import AsyncLLM

        self._wrap(AsyncLLM, "_run_output_handler", self._runs)

    def _runs(self, engine: Any) -> None:
        if engine is self._engine:
            return  # called before each request too
        if self._engine is not None:
            raise EngineError(
                f"A second AsyncLLM was made in one process, and {FRONT_ADDRESS} names one address.",
                "Its front is the first one's.",
                f"Leave {FRONT_ADDRESS} out and pass both as objects, or start each in a process of its own.",
            )
        self._engine = engine
        models: ModuleType | None = sys.modules.get(_MODELS_MODULE)
        if models is not None:  # an OpenAI server; a program with an AsyncLLM has no such table
            self._wrap_async(models.OpenAIServingModels, "init_static_loras", self._names.add_table)
        self._open_front(engine, self._address, self._names)

    def _wrap_async(self, owner: type, name: str, after: Callable[[Any], None]) -> None:
        theirs = owner.__dict__.get(name)
        if theirs is None:
            raise EngineError(
                f"Adapters could not be named to this vLLM server: {owner.__name__} has no {name}.",
                "It is where the table of model names is completed.",
                "Use a version that this plugin was tested with.",
            )

        async def wrapper(this: Any) -> None:
            await theirs(this)
            after(this)

        self._undo.append((owner, name, theirs))
        setattr(owner, name, wrapper)


_here: ServerPatches | None = None


def serve_beside(address: str) -> None:
    """Has a front opened on `address` beside the `AsyncLLM` that this process makes, if it makes one.

    Raises:
        EngineError: the address is none of a front's, or this vLLM has not the places for it.
    """
    global _here  # noqa: PLW0603 - one front a process, like the variable that asks for it
    parse_address(address)
    if _here is not None:
        return
    from vllm.config import ParallelConfig

    verdict = probe_front_beside(_facts(ParallelConfig))
    if isinstance(verdict, NotViable):
        raise EngineError(
            f"{FRONT_ADDRESS} is set, and no front can be opened beside this vLLM.",
            f"{verdict.reason}.",
            "Use a version that this plugin was tested with, or start `python -m weightlane_vllm.server`.",
        )
    from weightlane_vllm.server_front import open_front

    _here = ServerPatches(address, open_front)
    _here.apply(ParallelConfig)


def _facts(parallel_config: Any) -> EngineFacts:
    """Read from the source: importing `AsyncLLM` in every worker would take seconds."""
    from weightlane_vllm.facts import DISTRIBUTIONS, Question, ask_installed

    question = Question(OUTPUT_HANDLER, ("vllm/v1/engine/async_llm.py",), "AsyncLLM", "_run_output_handler")
    return EngineFacts(
        engine=ENGINE,
        version="",
        source="worker",
        attributes={
            WORKER_EXTENSION: "worker_extension_cls" in parallel_config.__dataclass_fields__,
            OUTPUT_HANDLER: bool(ask_installed(DISTRIBUTIONS, question)),
        },
    )


def _require_one_server(config: Any) -> None:
    import vllm.envs

    servers = config._api_process_count
    if servers > 1:
        raise EngineError(
            f"vLLM is to be started with {servers} API servers, and with {FRONT_ADDRESS}.",
            "Each would be a client of the engine, and a front is opened beside one.",
            "Start it with --api-server-count 1.",
        )
    if getattr(vllm.envs, "VLLM_USE_RUST_FRONTEND", False):
        raise EngineError(
            f"vLLM is to be started with VLLM_USE_RUST_FRONTEND, and with {FRONT_ADDRESS}.",
            "No engine object is made in that server, and a front is opened beside one.",
            "Unset VLLM_USE_RUST_FRONTEND.",
        )
