"""A tiny model on disk, a trainer's wrapped copy of it, and reference engines of this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightlane.lane import Lane
    from weightlane.reference.engine import ReferenceEngine


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads and lose much when other processes hold the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from adapter_models import make_base

    folder = tmp_path_factory.mktemp("adapter") / "model"
    make_base().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def policy(model_folder: str) -> Any:
    """The trainer's model: the folder's, wrapped by peft, its adapter away from zero."""
    from adapter_models import wrapped

    return wrapped(model_folder)


@pytest.fixture(scope="module")
def engine(model_folder: str) -> ReferenceEngine:
    from weightlane.reference.engine import ReferenceEngine

    return ReferenceEngine(model_folder)


@pytest.fixture
def base_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's backend cannot send the base: engines must hold it already."""
    from weightlane import adapter_planning, adapters

    def not_sent(values: dict[str, str], *, lane: str, not_sent: str) -> adapters.TrainedBase:
        assert not_sent == ""
        return adapters.trained_base(values, lane=lane, not_sent="this trainer cannot export phase base")

    monkeypatch.setattr(adapter_planning, "trained_base", not_sent)


@pytest.fixture
def open_lane() -> Iterator[Callable[..., Lane]]:
    """Joins a model to engines in mode adapter, in small buckets; closed at the end of the test."""
    from contextlib import ExitStack

    import weightlane as wl
    from weightlane.testing.ranks import _free_port

    with ExitStack() as lanes:

        def open_(model: Any, *engines: ReferenceEngine, **options: Any) -> Lane:
            adapter = options.pop("adapter", None)
            arguments = {
                "mode": "adapter",
                "bucket_bytes": 4096,
                "control": f"tcp://127.0.0.1:{_free_port()}",
                **options,
            }
            return lanes.enter_context(
                wl.connect(
                    trainer=wl.trainer("torch", model=model, adapter=adapter),
                    rollout=[wl.rollout("reference", engine=engine) for engine in engines],
                    **arguments,
                )
            )

        yield open_
