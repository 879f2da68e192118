"""`wl.trainer` and `wl.rollout` refuse what cannot be meant, before anything is opened."""

from __future__ import annotations

import pytest

import weightlane as wl
from weightlane.errors import EngineError, ExportError, UsageError
from weightlane.torch_trainer.plugin import TORCH


@pytest.mark.parametrize("options", [{}, {"url": "unix:/front", "engine": object()}])
def test_a_rollout_has_a_url_or_an_engine_and_never_both(options: dict[str, object]) -> None:
    with pytest.raises(EngineError, match="exactly one of url= and engine="):
        wl.rollout("vllm", **options)  # type: ignore[arg-type]


def test_an_engine_object_is_the_target() -> None:
    engine = object()
    assert wl.rollout("vllm", engine=engine).target.handle is engine


def test_an_option_that_the_backend_does_not_know_is_refused_by_name() -> None:
    from dataclasses import replace

    spec = replace(wl.trainer("torch", model=None), options={"placment": "partitioned"})
    with pytest.raises(ExportError, match=r"no option 'placment'[\s\S]*Use placement"):
        spec.options_for(TORCH)


def test_the_default_placement_is_dropped_for_a_backend_without_that_option() -> None:
    from dataclasses import replace

    assert wl.trainer("torch", model=None).options_for(replace(TORCH, options=frozenset())) == {}


@pytest.mark.parametrize("verify", ["canary", "Digest", ""])
def test_a_level_of_verification_that_does_not_exist_is_refused_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    monkeypatch.setattr(
        "weightlane.rendezvous.open_control_channel", lambda **wanted: pytest.fail("too late")
    )
    with pytest.raises(UsageError, match="It is one of off, counts, digest") as caught:
        wl.connect(trainer=wl.trainer("torch", model={}), rollout=None, verify=verify)  # type: ignore[arg-type]
    assert repr(verify) in caught.value.what
