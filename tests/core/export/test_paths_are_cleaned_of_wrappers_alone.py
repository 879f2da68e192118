"""Segments that wrappers put into paths are taken out; a module that is only called like one stays."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightlane.errors import ExportError
from weightlane.export.paths import cleaned, cleaned_keys, own_class, walk

WORDS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class FakeModule(nn.Module):
    """Has a child under each of the names that wrappers use."""

    def __init__(self, words: tuple[str, ...] = WORDS) -> None:
        super().__init__()
        for word in words:
            self.add_module(word, nn.Linear(2, 2, bias=False))


def in_fake(name: str, child: str, module: nn.Module) -> nn.Module:
    """FSDP 1's class needs ranks to be made, and torch.compile a second: what is read of a wrapper is its
    name, its package and its child."""
    wrapper = type(name, (nn.Module,), {"__module__": "torch.wrappers"})()
    wrapper.add_module(child, module)
    return wrapper


def in_fsdp(module: nn.Module) -> nn.Module:
    return in_fake("FullyShardedDataParallel", "_fsdp_wrapped_module", module)


def in_all(module: nn.Module) -> nn.Module:
    return in_fsdp(in_fake("OptimizedModule", "_orig_mod", checkpoint_wrapper(module)))


def test_a_models_own_modules_keep_their_names() -> None:
    model = FakeModule()
    keys = list(model.state_dict())
    assert keys == [f"{word}.weight" for word in WORDS]
    assert list(cleaned_keys(model, keys).values()) == keys
    assert [path for path, _ in walk(model)] == ["", *WORDS]


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, in_fsdp, in_all, lambda model: in_all(in_all(model))])
def test_wrappers_at_the_root_and_inside_are_taken_out(wrap: Any) -> None:
    words = WORDS[:-1]  # checkpoint_wrapper itself takes its own segment out wherever it stands
    plain = [f"first.{word}.weight" for word in words] + ["second.weight", "second.bias"]
    inner = nn.ModuleDict({"first": wrap(FakeModule(words)), "second": wrap(nn.Linear(2, 2))})
    for model in (inner, wrap(inner)):
        for raw in (
            [name for name, _ in model.named_parameters()],  # every segment
            list(model.state_dict()),  # some wrappers have taken theirs out
        ):
            assert list(cleaned_keys(model, raw).values()) == plain
        paths = [path for path, _ in walk(model)]
        assert len(paths) == len(set(paths)) == 3 + len(words)
    assert [name for name, _ in inner.named_parameters()] != plain


def test_two_keys_that_become_one_are_refused() -> None:
    model = nn.ModuleDict({"a": checkpoint_wrapper(nn.Linear(2, 2))})
    with pytest.raises(
        ExportError, match=r"a\._checkpoint_wrapped_module\.bias and a\.bias are both a\.bias"
    ):
        cleaned_keys(model, ["a._checkpoint_wrapped_module.bias", "a.bias"])


def test_keys_that_no_module_has_stay_as_they_are() -> None:
    assert cleaned(nn.Linear(2, 2), "nowhere.module.weight") == "nowhere.module.weight"


def test_the_class_behind_fsdp_2_is_found() -> None:
    fsdp = type("FSDPModule", (), {"__module__": "torch.distributed.fsdp"})
    made = type("FSDPLinear", (fsdp, nn.Linear), {"__module__": "torch.distributed.fsdp"})(2, 2)
    assert own_class(made) is own_class(nn.Linear(2, 2)) is nn.Linear
