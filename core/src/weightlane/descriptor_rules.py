"""What a descriptor must be like.

Checked as it is registered: selection judges all backends together, so that one that cannot be judged would
stop the choice among the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import PluginError
from weightlane.types import Capability, TransportName

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlane.types import BackendDescriptor


def require_sound(descriptor: BackendDescriptor) -> None:
    """Checks every field of a descriptor.

    Raises:
        PluginError: fields that are not what the contract asks for, each with the value found.
    """
    wrong = [
        f"{field} must be {wanted}, not {getattr(descriptor, field)!r}"
        for field, wanted, holds in _RULES
        if not holds(getattr(descriptor, field))
    ]
    if wrong:
        raise PluginError(f"Backend {descriptor.name!r} has {len(wrong)} wrong: {'; '.join(wrong)}.")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_range(value: object) -> bool:
    from packaging.specifiers import SpecifierSet  # loaded by whoever made a descriptor

    return isinstance(value, SpecifierSet)


def _are_names(value: object) -> bool:
    return isinstance(value, tuple | list | frozenset) and all(isinstance(item, str) for item in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_version(value: object) -> bool:
    """Whether a contract version can be compared with this core's."""
    return isinstance(value, tuple) and all(_is_number(part) for part in value)


def _are_capabilities(value: object) -> bool:
    return isinstance(value, frozenset | set) and all(isinstance(item, Capability) for item in value)


def _are_transports(value: object) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(item, TransportName) for item in value)


def _is_role(value: object) -> bool:
    return isinstance(value, str) and value in {"trainer", "rollout"}


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_RULES: tuple[tuple[str, str, Callable[[object], bool]], ...] = (
    ("name", "a name", _is_name),
    ("role", "trainer or rollout", _is_role),
    ("engine", "a name", _is_name),
    ("era", "a name", _is_name),
    ("versions", "a packaging SpecifierSet", _is_range),
    ("distributions", "a tuple of names", _are_names),
    ("probe", "a function", callable),
    ("capabilities", "a frozenset of Capability", _are_capabilities),
    ("transports", "a tuple of TransportName", _are_transports),
    ("api_version", "a tuple of numbers", is_version),
    ("priority", "a number", _is_number),
    ("install_hint", "text", _is_text),
    ("options", "a frozenset of names", _are_names),
)
