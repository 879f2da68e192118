"""The samples that these tests damage hold every message there is, so that a new one cannot be left out."""

from __future__ import annotations

import ast
import functools
import importlib
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import every_message
import msgspec
import pytest

import weightlane
from weightlane import lane_messages, messages
from weightlane.demo import messages as demo_messages

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

SOURCES = Path(weightlane.__file__).parent
UNIONS: dict[str, tuple[Any, tuple[msgspec.Struct, ...]]] = {
    "AgentRequest": (messages.AgentRequest, every_message.AGENT_REQUESTS),
    "AgentReply": (messages.AgentReply, every_message.AGENT_REPLIES),
    "FrontRequest": (messages.FrontRequest, every_message.FRONT_REQUESTS),
    "FrontReply": (messages.FrontReply, every_message.FRONT_REPLIES),
    "RankMessage": (demo_messages.RankMessage, every_message.DEMO),
}
SAMPLES = [*(message for message, _ in every_message.EVERY), *every_message.DEMO, every_message.TASK]


def types_in(kind: Any, found: set[type[msgspec.Struct]] | None = None) -> set[type[msgspec.Struct]]:
    """Every struct that a value of this type can hold, at any depth, itself included."""
    found = set() if found is None else found
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind not in found:
            found.add(kind)
            for field in typing.get_type_hints(kind).values():
                types_in(field, found)
    else:
        for argument in typing.get_args(kind):
            types_in(argument, found)
    return found


def structs_in(value: Any) -> list[msgspec.Struct]:
    """Every struct inside a value, at any depth, itself included."""
    if isinstance(value, msgspec.Struct):
        inner = [getattr(value, name) for name in value.__struct_fields__]
        return [value, *(item for part in inner for item in structs_in(part))]
    if isinstance(value, dict):
        return [item for part in value.values() for item in structs_in(part)]
    if isinstance(value, tuple | list):
        return [item for part in value for item in structs_in(part)]
    return []


def declared_in(module: Any) -> set[type[msgspec.Struct]]:
    here = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return {value for value in here if isinstance(value, type) and issubclass(value, msgspec.Struct)}


def tagged_in_core() -> set[type[msgspec.Struct]]:
    """Every class of core's sources with a tag: nothing but messages and their alternatives has one."""
    return {
        getattr(importlib.import_module(".".join(["weightlane", *module.parts])), node.name)
        for path in SOURCES.rglob("*.py")
        if "tag=" in path.read_text()
        for module in [path.relative_to(SOURCES).with_suffix("")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(keyword.arg == "tag" for keyword in node.keywords)
    }


def not_sampled(samples: list[msgspec.Struct], kinds: AbstractSet[type[msgspec.Struct]]) -> list[str]:
    here = {type(struct) for sample in samples for struct in structs_in(sample)}
    return sorted(kind.__name__ for kind in kinds - here)


def never_filled(samples: list[msgspec.Struct], kinds: AbstractSet[type[msgspec.Struct]]) -> list[str]:
    """Fields that have their default in every sample."""
    filled = {
        (type(struct), field.name)
        for sample in samples
        for struct in structs_in(sample)
        for field in msgspec.structs.fields(struct)
        if field.required or getattr(struct, field.name) != _default(field)
    }
    return sorted(
        f"{kind.__name__}.{field.name}"
        for kind in kinds
        for field in msgspec.structs.fields(kind)
        if (kind, field.name) not in filled and _can_vary(field.type)
    )


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _can_vary(kind: Any) -> bool:
    """Not so for a literal of one value."""
    return typing.get_origin(kind) is not typing.Literal or len(typing.get_args(kind)) > 1


@functools.cache
def every_type() -> frozenset[type[msgspec.Struct]]:
    """Whatever is declared as a message, and whatever a message can hold."""
    declared = declared_in(messages) | declared_in(lane_messages) | declared_in(demo_messages)
    found: set[type[msgspec.Struct]] = set()
    for kind in declared | {kind for kind in tagged_in_core() if not kind.__name__.startswith("_")}:
        types_in(kind, found)
    for union, _ in UNIONS.values():
        types_in(union, found)
    return frozenset(found)


@pytest.mark.parametrize("union", UNIONS)
def test_every_member_of_a_union_has_a_sample(union: str) -> None:
    members, samples = UNIONS[union]
    assert {type(sample) for sample in samples} == set(typing.get_args(members))


def test_every_message_between_ranks_has_a_sample() -> None:
    tagged = {kind for kind in declared_in(lane_messages) if kind.__struct_config__.tag is not None}
    assert {type(sample) for sample in every_message.LANE} == tagged


def test_every_struct_that_can_travel_is_in_some_sample() -> None:
    kinds = every_type()
    assert len(kinds) > 60
    assert not_sampled(SAMPLES, kinds) == []


def test_every_field_is_filled_in_some_sample() -> None:
    assert never_filled(SAMPLES, every_type()) == []


def test_a_private_struct_with_a_tag_is_another_reading_of_a_sampled_message() -> None:
    sampled = {type(sample).__struct_config__.tag: type(sample) for sample in SAMPLES}
    private = [kind for kind in tagged_in_core() if kind.__name__.startswith("_")]
    assert private
    for kind in private:
        assert kind.__struct_fields__ == sampled[kind.__struct_config__.tag].__struct_fields__


# -- negative controls: what would be forgotten is named -----------------------------------------------------


def test_a_struct_in_no_sample_is_named() -> None:
    fewer = [sample for sample in SAMPLES if not isinstance(sample, messages.EngineAnswer)]
    assert not_sampled(fewer, every_type()) == ["EngineAnswer"]


def test_a_struct_deep_inside_that_no_sample_reaches_is_named() -> None:
    added = msgspec.defstruct("Added", [("number", int, 0)])
    carries = msgspec.defstruct("Carries", [("added", dict[str, tuple[added | None, ...]], {})])
    kinds = types_in(msgspec.defstruct("Message", [("it", carries)]))
    assert {kind.__name__ for kind in kinds} == {"Message", "Carries", "Added"}
    assert not_sampled([carries()], {carries, added}) == ["Added"]
    assert never_filled([carries(), added()], {carries, added}) == ["Added.number", "Carries.added"]
    assert never_filled([carries({"a": (added(1),)})], {carries, added}) == []
