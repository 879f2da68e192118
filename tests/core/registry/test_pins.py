"""Reading pins: where they are written, what they may say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.errors import PinError, SelectionError
from weightlane.facts import EngineFacts
from weightlane.pins import assume_variable, engine_key, find_pins, parse_pin, with_assumed_version

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "distribution", "entry", "fits", "fits_not"),
    [
        ("acme-vllm", "acme-vllm", "", "0.0.1", None),
        ("Acme_VLLM==1.2.*", "acme-vllm", "", "1.2.9", "1.3"),
        ("acme-vllm[fast]>=1.2,<2", "acme-vllm", "fast", "1.2", "2.0"),
    ],
)
def test_a_pin_is_a_distribution_with_range_and_entry_point(
    text: str, distribution: str, entry: str, fits: str, fits_not: str | None
) -> None:
    pin = parse_pin(text, "here")
    assert (pin.distribution, pin.entry) == (distribution, entry)
    assert pin.versions.contains(fits)
    assert fits_not is None or not pin.versions.contains(fits_not)


@pytest.mark.parametrize(
    "text", ["acme vllm", "==1.2", "acme @ https://x.invalid/a.whl", "acme; python_version>'3'", "acme[a,b]"]
)
def test_a_malformed_pin_is_an_error_that_says_where_it_is(text: str) -> None:
    with pytest.raises(PinError, match="the environment"):
        parse_pin(text, "the environment")


def test_pins_come_from_the_environment_before_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.weightlane.pins]\nvllm = "from-file"\n"my-engine" = "mine==1"\n'
    )
    pins = find_pins({"WEIGHTLANE_PIN_VLLM": "from-env", "WEIGHTLANE_PIN_SGLANG": ""}, tmp_path)
    assert {key: pin.distribution for key, pin in pins.items()} == {"VLLM": "from-env", "MY_ENGINE": "mine"}
    assert "WEIGHTLANE_PIN_VLLM" in pins["VLLM"].origin
    assert "pyproject.toml" in pins["MY_ENGINE"].origin


@pytest.mark.parametrize(
    "text", ["", "[tool.other]\nx = 1\n", "[tool.weightlane]\nx = 1\n", "weightlane_is = 1"]
)
def test_a_project_without_pins_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert find_pins({}, tmp_path) == {}


def test_no_project_file_is_no_pin(tmp_path: Path) -> None:
    assert find_pins({}, tmp_path) == {}


@pytest.mark.parametrize(
    "text",
    [
        "[tool.weightlane.pins\n",
        "[tool.weightlane.pins]\nvllm = 3\n",
        "[tool.weightlane]\npins = 'acme'\n",
        "[tool]\nweightlane = 3\n",
        '[tool.weightlane.pins]\nmy-engine = "one"\nMy_Engine = "two"\n',
    ],
)
def test_pins_that_cannot_be_read_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(PinError, match=r"pyproject\.toml"):
        find_pins({}, tmp_path)


def test_an_engine_is_spelt_as_variables_are() -> None:
    assert engine_key("my-engine.2") == "MY_ENGINE_2"
    assert assume_variable("vllm") == "WEIGHTLANE_ASSUME_VLLM_VERSION"


@pytest.mark.parametrize(
    ("version", "allowed"),
    [("1.2.9", True), ("1.2rc1", True), ("1.3", False), ("", False), ("no number", False)],
)
def test_a_pinned_range_is_compared_with_any_text_that_metadata_may_hold(version: str, allowed: bool) -> None:
    assert parse_pin("acme==1.2.*", "here").allows(version) is allowed
    assert parse_pin("acme", "here").allows(version)


def test_an_assumed_version_that_is_none_is_an_error_naming_the_variable() -> None:
    facts = EngineFacts(engine="vllm", version="0.1", source="server")
    with pytest.raises(SelectionError, match=r"WEIGHTLANE_ASSUME_VLLM_VERSION=main states no version"):
        with_assumed_version(facts, {"WEIGHTLANE_ASSUME_VLLM_VERSION": "main"})


def test_an_assumed_version_replaces_only_the_version() -> None:
    facts = EngineFacts(engine="vllm", version="0.0.0+odd", source="server", routes=("/x",))
    assert with_assumed_version(facts, {}) is facts
    assumed = with_assumed_version(facts, {"WEIGHTLANE_ASSUME_VLLM_VERSION": " 0.32.0 "})
    assert (assumed.version, assumed.source, assumed.routes) == ("0.32.0", "server", ("/x",))
