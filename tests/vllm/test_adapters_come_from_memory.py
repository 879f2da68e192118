"""The one method of vLLM's manager that is changed, and how an adapter is made by whatever class there is."""

from __future__ import annotations

from typing import Any

import pytest

from weightlane.errors import EngineError
from weightlane.probes import NotViable, Viable
from weightlane_vllm.adapter_supply import AdapterSupply, probe_adapter_supply
from weightlane_vllm.lora_layers import renames_alone
from weightlane_vllm.lora_model import arguments_for


class TestAnInstalledClass:
    """Called with what it has parameters for, and with nothing that it does not know (areal #901)."""

    KNOWN: dict[str, Any] = dict.fromkeys(
        ("lora_model_id", "tensors", "peft_helper", "dtype", "device", "model_vocab_size"), 0
    )

    def test_is_given_what_it_has(self) -> None:
        def make(lora_model_id: int, tensors: Any, peft_helper: Any, dtype: Any, extra: int = 1) -> None: ...

        assert set(arguments_for(make, self.KNOWN)) == {"lora_model_id", "tensors", "peft_helper", "dtype"}

    def test_that_requires_more_is_refused(self) -> None:
        def make(lora_model_id: int, tensors: Any, peft_helper: Any, dtype: Any, embeddings: Any) -> None: ...

        with pytest.raises(EngineError, match="requires embeddings"):
            arguments_for(make, self.KNOWN)

    def test_that_cannot_be_given_renames_is_refused_where_there_are_some(self) -> None:
        def make(lora_model_id: int, tensors: Any, peft_helper: Any, dtype: Any) -> None: ...

        with pytest.raises(EngineError, match="has no weights_mapper"):
            arguments_for(make, {**self.KNOWN, "weights_mapper": object()})


class FakeManager:
    """Has the one method of vLLM's manager that is changed."""

    def _load_adapter(self, lora_request: Any) -> str:
        return f"from {lora_request.lora_path}"


class FakeRequest:
    lora_int_id, lora_path = 7, "/a/folder"


def test_only_numbers_that_are_offered_come_from_memory_and_the_change_can_be_undone() -> None:
    manager = FakeManager()
    supply = AdapterSupply(manager)
    supply.apply()
    supply.apply()
    assert manager._load_adapter(FakeRequest()) == "from /a/folder"
    supply.offer(7, lambda: "memory")
    assert manager._load_adapter(FakeRequest()) == "memory"
    assert FakeManager()._load_adapter(FakeRequest()) == "from /a/folder", "another manager is untouched"
    supply.withdraw(7)
    assert manager._load_adapter(FakeRequest()) == "from /a/folder"
    supply.offer(7, lambda: "memory")
    supply.undo()
    supply.undo()
    assert (manager._load_adapter(FakeRequest()), supply.active) == ("from /a/folder", False)


def test_the_change_is_refused_where_the_method_is_another() -> None:
    assert isinstance(probe_adapter_supply(FakeManager()), Viable)
    assert isinstance(probe_adapter_supply(object()), NotViable)
    taking_more = type("FakeOther", (), {"_load_adapter": lambda self, lora_request, more: None})
    assert isinstance(probe_adapter_supply(taking_more()), NotViable)


class TestNamesOfAnAdapter:
    """Go through a model class's renames and never through its stacking, whichever mapper the version has."""

    @pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
    def test_by_the_mapper_s_own_answer_where_it_stacks(self, method: str) -> None:
        fields = {"orig_to_new_stacked": {}, method: lambda self: "renames"}
        assert renames_alone(type("FakeMapper", (), fields)()) == "renames"

    def test_by_the_mapper_itself_where_it_knows_no_stacking(self) -> None:
        mapper = type("FakeMapperOf023", (), {"orig_to_new_prefix": {}})()
        assert renames_alone(mapper) is mapper
        assert renames_alone(None) is None

    def test_not_by_one_that_stacks_and_tells_nothing_else(self) -> None:
        mapper = type("FakeMapper", (), {"orig_to_new_stacked": {}})()
        with pytest.raises(EngineError, match="has orig_to_new_stacked and none of get_rename_mapper"):
            renames_alone(mapper)
