"""In place where parameters stand, through the engine's layerwise reload where they were packed away."""

from __future__ import annotations

import pytest

from weightlane.errors import UsageError
from weightlane.facts import EngineFacts
from weightlane.probes import NotViable, Viable
from weightlane.receiver import LiveTensor
from weightlane_vllm.facts import LAYERWISE_RELOAD
from weightlane_vllm.load_path import LoadPath, choose_path, probe_layerwise_reload
from weightlane_vllm.patches import CPU_WEIGHTS, apply_where_viable, wants_packed

PLAIN = LiveTensor("norm.weight", (4,), "float32")
PACKED = LiveTensor("q.weight", (0,), "float32")


def facts(*, reloads: bool) -> EngineFacts:
    return EngineFacts("vllm", "0.32.0", "worker", attributes={LAYERWISE_RELOAD: reloads})


def test_both_answers_of_the_probe() -> None:
    found, absent = (probe_layerwise_reload(facts(reloads=answer)) for answer in (True, False))
    assert isinstance(found, Viable)
    assert "initialize_layerwise_reload is defined" in found.evidence[0]
    assert isinstance(absent, NotViable)
    assert "initialize_layerwise_reload" in absent.reason


@pytest.mark.parametrize("reloads", [True, False])
def test_parameters_that_stand_are_written_in_place(reloads: bool) -> None:
    path = choose_path(facts(reloads=reloads), (PLAIN,), ())
    assert path == LoadPath("in-place", ("all of 1 live tensors hold their elements",))


def test_packed_ones_are_reloaded_with_the_evidence() -> None:
    path = choose_path(facts(reloads=True), (PLAIN, PACKED), {"q.weight"})
    assert isinstance(path, LoadPath)
    assert path.name == "layerwise-reload"
    assert path.evidence[0].startswith("the engine packed 1 parameters away")


@pytest.mark.parametrize(
    ("reloads", "recorded", "reason"),
    [
        (False, ("q.weight",), "cannot load them again"),
        (True, (), "has no record of how it loaded q.weight"),
    ],
)
def test_without_reload_or_record_there_is_no_path(
    reloads: bool, recorded: tuple[str, ...], reason: str
) -> None:
    path = choose_path(facts(reloads=reloads), (PLAIN, PACKED), recorded)
    assert isinstance(path, NotViable)
    assert reason in path.reason


def test_packing_is_left_on_by_the_users_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CPU_WEIGHTS, raising=False)
    assert not wants_packed()
    monkeypatch.setenv(CPU_WEIGHTS, "packed")
    assert wants_packed()
    assert not apply_where_viable(), "nor is vLLM imported to find out"
    monkeypatch.setenv(CPU_WEIGHTS, "kept")
    with pytest.raises(UsageError, match="plain or packed"):
        wants_packed()
