"""A front is opened beside the engine of a vLLM that was asked for one, of no other; failures are loud."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError
from weightlane.facts import EngineFacts, no_facts
from weightlane.probes import NotViable, Viable
from weightlane_vllm import general_plugin, server_front, server_patches
from weightlane_vllm.facts import WORKER_EXTENSION
from weightlane_vllm.opened_engine import WORKER_EXTENSION_CLASS
from weightlane_vllm.server_patches import OUTPUT_HANDLER, ServerPatches, probe_front_beside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import FakeVllm

ADDRESS = "unix:/run/user/1/front"


class Opened(list[Any]):
    """Engines over which a front was opened, and the names that it was given."""

    def __call__(self, engine: Any, address: str, names: Any) -> None:
        assert address == ADDRESS
        self.append(engine)
        self.names = names


@pytest.fixture
def opened() -> Opened:
    return Opened()


@pytest.fixture
def patches(fake_vllm: FakeVllm, opened: Opened) -> Iterator[ServerPatches]:
    patches = ServerPatches(ADDRESS, opened)
    patches.apply(fake_vllm.ParallelConfig)
    yield patches
    patches.undo()


def test_the_entry_point_does_nothing_and_imports_nothing_unless_asked() -> None:
    pyproject = Path(__file__).parents[3] / "plugins/vllm/pyproject.toml"
    assert f'weightlane = "{general_plugin.__name__}:register"' in pyproject.read_text()
    code = (
        "import sys; from weightlane_vllm.general_plugin import register; register(); register(); "
        "print([n for n in sys.modules if n.split('.')[0] in ('weightlane', 'torch', 'vllm', 'msgspec')])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_an_engine_gets_the_worker_extension_and_one_front(
    patches: ServerPatches, fake_vllm: FakeVllm, opened: Opened
) -> None:
    del patches
    for given in ("", WORKER_EXTENSION_CLASS):
        config = fake_vllm.ParallelConfig(given)
        assert config.checked
        assert config.worker_extension_cls == WORKER_EXTENSION_CLASS
    engine = fake_vllm.AsyncLLM()
    engine._run_output_handler()
    assert engine.handlers == 2
    assert opened == [engine]
    with pytest.raises(EngineError, match="A second AsyncLLM was made in one process"):
        fake_vllm.AsyncLLM()


@pytest.mark.parametrize(
    ("given", "rust", "why"),
    [
        (("mine.Extension",), False, "--worker-extension-cls mine.Extension"),
        (("", 2), False, "with 2 API servers.*--api-server-count 1"),
        ((), True, "VLLM_USE_RUST_FRONTEND"),
    ],
)
def test_what_leaves_no_place_for_a_front_is_an_error_before_the_engine_starts(
    patches: ServerPatches, fake_vllm: FakeVllm, given: tuple[Any, ...], rust: bool, why: str
) -> None:
    del patches
    sys.modules["vllm.envs"].VLLM_USE_RUST_FRONTEND = rust  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=rf"(?s){why}"):
        fake_vllm.ParallelConfig(*given)


def test_undone_patches_leave_vllm_as_it_was(
    patches: ServerPatches, fake_vllm: FakeVllm, opened: Opened
) -> None:
    patches.apply(fake_vllm.ParallelConfig)
    fake_vllm.ParallelConfig()
    patches.undo()
    patches.undo()
    assert fake_vllm.ParallelConfig("mine.Extension").worker_extension_cls == "mine.Extension"
    fake_vllm.AsyncLLM()
    assert opened == []


def test_the_table_of_models_gets_what_is_served_and_keeps_its_users_own(
    patches: ServerPatches, fake_vllm: FakeVllm, opened: Opened
) -> None:
    del patches
    fake_vllm.ParallelConfig()
    fake_vllm.AsyncLLM()
    names = opened.names
    names.show([AdapterRef("default@1", 1)])
    models = fake_vllm.OpenAIServingModels()
    models.lora_requests["mine"] = "theirs"
    asyncio.run(models.init_static_loras())
    assert models.loaded
    assert set(models.lora_requests) == {"mine", "default@1"}
    names.show([AdapterRef("default@2", 2), AdapterRef("other@1", 1)])
    assert set(models.lora_requests) == {"mine", "default@2", "other@1"}
    assert models.lora_requests["default@2"][2].endswith("default@2/2")
    with pytest.raises(EngineError, match="a model named 'mine'"):
        names.show([AdapterRef("mine", 1)])
    names.withdraw()
    assert models.lora_requests == {"mine": "theirs"}


def test_a_vllm_without_the_places_is_refused_loudly(
    fake_vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = EngineFacts("vllm", "", "worker", attributes={WORKER_EXTENSION: True, OUTPUT_HANDLER: True})
    assert isinstance(probe_front_beside(seen), Viable)
    without = EngineFacts("vllm", "", "worker", attributes={WORKER_EXTENSION: True, OUTPUT_HANDLER: False})
    assert isinstance(probe_front_beside(without), NotViable)
    assert isinstance(probe_front_beside(no_facts("vllm")), NotViable)
    fake_vllm.put("vllm.config", ParallelConfig=fake_vllm.ParallelConfig)
    monkeypatch.setattr(server_patches, "_facts", lambda _: without)
    monkeypatch.setenv(general_plugin.FRONT_ADDRESS, ADDRESS)
    with pytest.raises(
        EngineError, match=r"no front can be opened beside this vLLM[\s\S]*_run_output_handler"
    ):
        general_plugin.register()
    monkeypatch.setenv(general_plugin.FRONT_ADDRESS, "unix:relative")
    with pytest.raises(EngineError, match="not the address of a front"):
        general_plugin.register()


def test_a_front_that_cannot_be_served_ends_the_server_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(server_front, "_end_server", lambda: ended.append(True))
    monkeypatch.setattr("weightlane_vllm.eras.reference_here", lambda: "vllm")
    server_front._serve(object(), ADDRESS, None)  # type: ignore[arg-type]
    assert ended == [True]
    told = capsys.readouterr().err
    assert f"the front {ADDRESS} could not be served, so the server ends" in told
    assert "was given a builtins.object" in told
