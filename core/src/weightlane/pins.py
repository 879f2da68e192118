"""What the user decides before selection does: pinned plugins and assumed engine versions.

A pin names one distribution, optionally its versions and one of its entry points: `acme-vllm`,
`acme-vllm==1.2.*`, `acme-vllm[fast]>=1.2` (entry point `fast`). A pin is never a preference: where it cannot
be met, that is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from weightlane.declared import normalized
from weightlane.errors import PinError, SelectionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from packaging.specifiers import SpecifierSet

    from weightlane.facts import EngineFacts

PIN_PREFIX = "WEIGHTLANE_PIN_"


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin; `origin` says where the user wrote it. `entry` is "" when any entry point will do."""

    distribution: str
    versions: SpecifierSet
    entry: str
    text: str
    origin: str

    def names(self, distribution: str, entry: str) -> bool:
        """Whether the pin is about this entry point of this distribution, whatever its version."""
        return self.distribution == normalized(distribution) and self.entry in {"", entry}

    def allows(self, version: str) -> bool:
        """Whether the pinned range holds this version of the distribution, pre-releases included."""
        if not len(self.versions):
            return True
        from packaging.version import InvalidVersion

        try:
            return bool(version) and self.versions.contains(version, prereleases=True)
        except InvalidVersion:  # older packaging raises where newer says no
            return False


def engine_key(engine: str) -> str:
    """An engine's name as environment variables spell it: `my-engine` becomes `MY_ENGINE`."""
    return re.sub(r"[^A-Za-z0-9]", "_", engine).upper()


def parse_pin(text: str, origin: str) -> Pin:
    """Reads one pin.

    Raises:
        PinError: it is not a distribution name with an optional version range and entry point.
    """
    from packaging.requirements import InvalidRequirement, Requirement  # few processes have a pin to read

    try:
        requirement = Requirement(text)
    except InvalidRequirement as exc:
        raise _malformed(text, origin, str(exc).splitlines()[0]) from exc
    if requirement.url or requirement.marker:
        raise _malformed(text, origin, "a pin takes neither a URL nor a marker")
    if len(requirement.extras) > 1:
        raise _malformed(text, origin, "a pin names at most one entry point in brackets")
    return Pin(
        distribution=normalized(requirement.name),
        versions=requirement.specifier,
        entry=next(iter(requirement.extras), ""),
        text=text,
        origin=origin,
    )


def find_pins(environ: Mapping[str, str], project: Path) -> dict[str, Pin]:
    """Pins by `engine_key`: the environment's first, then those of `project`/pyproject.toml.

    Raises:
        PinError: a pin is malformed, or the file that holds pins cannot be read.
    """
    path = project / "pyproject.toml"
    pins: dict[str, Pin] = {}
    for engine, text in _project_pins(path).items():
        if engine_key(engine) in pins:
            raise _unreadable(path, f"{engine} is pinned twice: names that differ in signs or case are one")
        pins[engine_key(engine)] = parse_pin(text, f"[tool.weightlane.pins] of {path}")
    for variable, text in sorted(environ.items()):
        if variable.startswith(PIN_PREFIX) and text.strip():
            pins[variable[len(PIN_PREFIX) :]] = parse_pin(text, f"environment variable {variable}")
    return pins


def assume_variable(engine: str) -> str:
    """The variable with which a user states the version of an odd build of this engine."""
    return f"WEIGHTLANE_ASSUME_{engine_key(engine)}_VERSION"


def assumed_version(engine: str, environ: Mapping[str, str]) -> str:
    """The version that the user states for this engine, or "".

    Raises:
        SelectionError: what is stated is no version, so that no range could ever be compared with it.
    """
    variable = assume_variable(engine)
    text = environ.get(variable, "").strip()
    if not text:
        return ""
    from packaging.version import InvalidVersion, Version

    try:
        Version(text)
    except InvalidVersion as exc:
        raise SelectionError(
            f"{variable}={text} states no version.",
            "It stands in for that of the engine and is compared with the ranges of backends.",
            f"Write one such as {variable}=0.32.0, or unset it.",
        ) from exc
    return text


def with_assumed_version(facts: EngineFacts, environ: Mapping[str, str]) -> EngineFacts:
    """The facts with the version that the user assumes for this engine, or as they were."""
    version = assumed_version(facts.engine, environ)
    return msgspec.structs.replace(facts, version=version) if version else facts


def _project_pins(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as exc:
        raise _unreadable(path, str(exc)) from exc
    if "weightlane" not in text:  # spares the parser's import in every project without pins
        return {}
    table: Any = _parse_toml(text, path)
    for word in ("tool", "weightlane", "pins"):
        table = table.get(word, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise _unreadable(path, "[tool.weightlane.pins] must map engine names to strings")
    return dict(table)


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise _unreadable(path, str(exc)) from exc


def _malformed(text: str, origin: str, reason: str) -> PinError:
    return PinError(
        f"The pin {text!r} ({origin}) cannot be read.",
        f"{reason.rstrip('.')}.",
        "Write a distribution with an optional version range, such as acme-vllm==1.2.*.",
    )


def _unreadable(path: Path, reason: str) -> PinError:
    return PinError(
        f"Pins cannot be read from {path}.",
        f"{reason.rstrip('.')}.",
        'Write them as [tool.weightlane.pins] with lines such as vllm = "acme-vllm==1.2.*".',
    )
