"""What a request to vLLM names, and which adapter it is answered with."""

from __future__ import annotations

import pytest

from weightlane import messages
from weightlane.adapters import AdapterRef
from weightlane.errors import EngineError
from weightlane.failures import failure_of
from weightlane_vllm.lora_request import lora_number, lora_path
from weightlane_vllm.served_adapters import ServedAdapters, chosen_adapter


def test_numbers_follow_from_names_and_keep_out_of_the_way() -> None:
    names = [f"{name}@{version}" for name in ("default", "other") for version in range(2000)]
    numbers = {lora_number(name) for name in names}
    assert len(numbers) == len(names)
    assert min(numbers) >= 2**30
    assert max(numbers) < 2**31
    assert lora_number("default@7") == lora_number("default@7")


def test_the_path_is_absolute_and_tells_versions_of_one_name_apart() -> None:
    one, other = lora_path(AdapterRef("a/b", 1)), lora_path(AdapterRef("a/b", 2))
    assert one != other
    assert one.startswith("/")
    assert one.split("/")[-2:] == ["a%2Fb", "1"]


def served(*refs: AdapterRef) -> bytes:
    return messages.encode(ServedAdapters(refs))


ONE, TWO = AdapterRef("default@1", 1), AdapterRef("other", 5)


class TestARequest:
    def test_is_answered_with_what_it_names(self) -> None:
        assert chosen_adapter([served(ONE, TWO), served(TWO, ONE)], "other") == TWO

    def test_gets_the_base_only_where_no_adapter_is_served(self) -> None:
        assert chosen_adapter([served(), served()], "") is None
        with pytest.raises(EngineError, match="names no adapter"):
            chosen_adapter([served(ONE)], "")

    @pytest.mark.parametrize("answers", [[served()], [served(TWO)]])
    def test_never_gets_the_base_in_an_adapters_place(self, answers: list[bytes]) -> None:
        with pytest.raises(EngineError, match="serves no adapter 'default@1'"):
            chosen_adapter(answers, "default@1")

    def test_is_refused_where_workers_differ_or_fail(self) -> None:
        with pytest.raises(EngineError, match="worker 0 default@1; worker 1 the base alone"):
            chosen_adapter([served(ONE), served()], "default@1")
        failed = messages.encode(failure_of(EngineError("It is lost."), origin="worker 1"))
        with pytest.raises(EngineError, match="It is lost"):
            chosen_adapter([served(ONE), failed], "default@1")
