"""Every wrapper, kind of model, peft and mode: what ranks are given is the unsharded model's, bit for bit.

All cases of a world size run in one start of its ranks; each is a test of its own here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import four_ranks
import pytest
import two_ranks
import two_ranks_peft

if TYPE_CHECKING:
    from collections.abc import Callable

    from case_outcomes import Outcomes

    OutcomesOf = Callable[[str, int], Outcomes]

pytestmark = [pytest.mark.fsdp, pytest.mark.timeout(290)]


@pytest.mark.requirement("R15")
@pytest.mark.requirement("R17")
@pytest.mark.parametrize("case", two_ranks.VALUES)
def test_two_ranks_export_what_the_unsharded_model_has(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)


@pytest.mark.requirement("R1")
@pytest.mark.requirement("R6")
@pytest.mark.requirement("R12")
@pytest.mark.requirement("R13")
@pytest.mark.parametrize("case", two_ranks_peft.CASES)
def test_two_ranks_export_adapters_as_the_unsharded_model_has_them(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks_peft", 2).require(case)


@pytest.mark.requirement("R15")
@pytest.mark.parametrize("case", four_ranks.CASES)
def test_four_ranks_export_what_the_unsharded_model_has(outcomes: OutcomesOf, case: str) -> None:
    outcomes("four_ranks", 4).require(case)


@pytest.mark.requirement("R7")
@pytest.mark.parametrize("case", two_ranks.OFFLOADING)
def test_two_ranks_are_not_offloaded_before_the_last_bucket(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)


@pytest.mark.requirement("R9")
@pytest.mark.parametrize("case", two_ranks.STAGING)
def test_two_ranks_stage_for_a_merge_alone(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)


@pytest.mark.requirement("R14")
@pytest.mark.parametrize("case", two_ranks.ADAPTERS)
def test_two_ranks_put_no_adapter_on_another_base(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)


@pytest.mark.parametrize("case", two_ranks.NORMAL)
def test_two_ranks_give_the_normal_form_of_the_unsharded_adapter(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)


@pytest.mark.parametrize("case", two_ranks.QUANTISED)
def test_two_ranks_refuse_a_quantised_base_by_name(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)


@pytest.mark.requirement("R2")
@pytest.mark.requirement("R3")
@pytest.mark.requirement("R4")
@pytest.mark.requirement("R10")
@pytest.mark.requirement("R11")
@pytest.mark.requirement("R16")
@pytest.mark.parametrize("case", two_ranks.SPECIAL)
def test_two_ranks_keep_to_the_rules_of_an_export(outcomes: OutcomesOf, case: str) -> None:
    outcomes("two_ranks", 2).require(case)
