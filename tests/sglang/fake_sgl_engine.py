"""A fake `sgl.Engine`: its event loop is real and stands still between calls, its scheduler is not there."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

VERSION = "0.5.18"


@dataclass
class UpdateOfOld:
    """As before 0.5.15: a dataclass."""

    serialized_named_tensors: list[Any]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateOfNew(msgspec.Struct, kw_only=True, array_like=True, tag=True):
    """As since 0.5.15: a struct that cannot be made by position."""

    serialized_named_tensors: list[bytes]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class Pause(msgspec.Struct, kw_only=True):
    mode: str = "abort"


class Continue(msgspec.Struct, kw_only=True):
    pass


class Load(msgspec.Struct, kw_only=True):
    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: str


class Unload(msgspec.Struct, kw_only=True):
    lora_name: str


class Version(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class Generate(msgspec.Struct, kw_only=True):
    input_ids: list[list[int]]


class LoraAnswer(msgspec.Struct):
    success: bool
    error_message: str | None = None
    loaded_adapters: dict[str, str] | None = None


class FlushAnswer(msgspec.Struct):
    success: bool
    message: str = ""


STRUCTS = SimpleNamespace(
    UpdateWeightsFromTensorReqInput=UpdateOfNew,
    PauseGenerationReqInput=Pause,
    ContinueGenerationReqInput=Continue,
    LoadLoRAAdapterFromTensorsReqInput=Load,
    UnloadLoRAAdapterReqInput=Unload,
    UpdateWeightVersionReqInput=Version,
    GenerateReqInput=Generate,
)


@dataclass
class FakeArguments:
    tp_size: int = 2
    pp_size: int = 1
    dp_size: int = 1
    device: str = "cpu"
    random_seed: int = 7
    dtype: str = "float32"
    enable_lora: bool = True
    lora_target_modules: set[str] = field(default_factory=lambda: {"v_proj", "q_proj"})
    weight_version: str = "default"


@dataclass
class FakeTokenizerManager:
    """Keeps what it was handed; `before` runs within each update."""

    server_args: FakeArguments = field(default_factory=FakeArguments)
    got: list[Any] = field(default_factory=list)
    before: Callable[[], Any] = lambda: asyncio.sleep(0)
    event_loop: asyncio.AbstractEventLoop | None = None
    model_path: str = "/nowhere"
    served_model_name: str = "served"
    answer: Any = (True, "Success")
    loaded: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]))
        self.lora_registry = SimpleNamespace(get_all_adapters=lambda: self.loaded)

    async def update_weights_from_tensor(self, obj: Any, request: Any = None) -> Any:
        del request
        await self.before()
        self.got.append(obj)
        return self.answer

    async def pause_generation(self, obj: Any) -> None:
        self.got.append(obj)

    async def continue_generation(self, obj: Any) -> None:
        self.got.append(obj)

    async def load_lora_adapter_from_tensors(self, obj: Any, _: Any = None) -> Any:
        self.got.append(obj)
        self.loaded["id"] = SimpleNamespace(lora_name=obj.lora_name)
        return LoraAnswer(True, None, {obj.lora_name: "path"})

    async def unload_lora_adapter(self, obj: Any, _: Any = None) -> Any:
        await self.before()
        self.got.append(obj)
        return LoraAnswer(False, f"LoRA with name {obj.lora_name} does not exist")

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        self.got.append(timeout_s)
        return FlushAnswer(timeout_s is not None, "requests run")

    async def generate_request(self, obj: Any, request: Any = None) -> Any:
        del request
        if not obj.input_ids:
            raise ValueError("no prompt")
        yield [{"meta_info": {"id": "x"}}]

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [{}]

    def _update_weight_version_if_provided(self, version: str) -> None:
        self.server_args.weight_version = version


class FakeEngine:
    """Has what our channel looks for in an `sgl.Engine`."""

    def __init__(self, *children: int) -> None:
        self.tokenizer_manager = FakeTokenizerManager()
        self.server_args = self.tokenizer_manager.server_args
        self.loop = asyncio.new_event_loop()
        self._scheduler_init_result = SimpleNamespace(all_child_pids=list(children))

    def generate(self) -> str:
        """A call of the owner's, as SGLang makes each of them."""

        async def generated() -> str:
            return "text"

        coroutine = generated()
        try:
            return self.loop.run_until_complete(coroutine)
        finally:
            coroutine.close()

    def shutdown(self) -> None:
        """Ends what is left on the loop, and closes it."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `import_module` find the fake's request classes and version."""
    monkeypatch.setitem(sys.modules, "sglang.version", SimpleNamespace(__version__=VERSION))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", STRUCTS)  # type: ignore[arg-type]
