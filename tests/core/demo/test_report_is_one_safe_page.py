from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from weightlane.demo.messages import Closing, Connected, LastProbs, StepReport
from weightlane.demo.report import write_report
from weightlane.demo.session import Record
from weightlane.demo.settings import DemoSettings
from weightlane.demo.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def record(good_steps: list[StepReport], good_closing: Closing, tmp_path: Path) -> Record:
    settings = DemoSettings(
        trainer="torch",
        rollout="reference",
        mode="full",
        model=None,
        rollout_python=None,
        url="",
        steps=8,
        sync_each_step=True,
        report=tmp_path / "report.html",
    )
    return Record(
        settings,
        Connected("lane x: 21 tensors -> <worker>", "LlamaForCausalLM", 164_160),
        steps=good_steps,
        probs=LastProbs((0.1, 0.5, 0.9), (0.1, 0.5, 0.9)),
        closing=good_closing,
        verdict=Verdict(passed=True, reasons=()),
        seconds=12.0,
    )


def page(record: Record) -> str:
    write_report(record, record.settings.report)
    return record.settings.report.read_text(encoding="utf-8")


def test_it_holds_four_plots_the_plan_the_table_and_the_verdict(record: Record) -> None:
    text = page(record)
    assert text.count("<svg") == 4
    assert text.count("<tr>") == 9
    assert "PASS" in text
    assert "rollout_actor_probs_pearson_corr" in text
    assert "21 tensors -&gt; &lt;worker&gt;" in text


def test_it_fetches_nothing(record: Record) -> None:
    text = page(record)
    assert "<script" not in text
    assert "<link" not in text
    assert "url(http" not in text
    assert 'src="' not in text


def test_what_processes_said_is_text_and_not_markup(record: Record) -> None:
    record.verdict = Verdict(passed=False, reasons=("<img src=x onerror=alert(1)>",))
    text = page(record)
    assert "<img" not in text
    assert "&lt;img src=x" in text


def test_a_run_that_broke_before_its_first_step_has_a_page_too(record: Record) -> None:
    record.steps, record.closing, record.probs = [], None, LastProbs((), ())
    record.verdict = Verdict(passed=False, reasons=("The engine is gone.",))
    text = page(record)
    assert text.count("<svg") == 0
    assert "The engine is gone." in text
