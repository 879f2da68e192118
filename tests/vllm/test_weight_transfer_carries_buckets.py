"""Both ends of our weight-transfer backend together, over a traced model of plain torch; vLLM is not here."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from weightlane.errors import EngineError, PlanError, Problem, ProtocolError, SyncError, UsageError
from weightlane.trace.table import TableKey, TracedSource
from weightlane_vllm import transfer_receiver
from weightlane_vllm.transfer_receiver import TransferInit, TransferReceiver, TransferUpdate
from weightlane_vllm.transfer_sender import WeightSender

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from weightlane.messages import WireTensor
    from weightlane.trace.table import PlacementTable


class FakeModel(nn.Module):
    """A fused parameter, a norm and a buffer, with a loader as engines have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("bias", torch.zeros(2))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name in ("q", "k"):
                self.qk[:2].copy_(tensor) if name == "q" else self.qk[2:].copy_(tensor)
            else:
                {"norm": self.norm, "bias": self.get_buffer("bias")}[name].copy_(tensor)


class FakeEngine:
    """What `VllmWorkerEngine` does of it, for that model."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.problems: list[Problem] = []
        self.begun = 0
        self.ties: dict[str, str] = {}

    def load_problems(self) -> list[Problem]:
        return self.problems

    def trace(self, tensors: Sequence[WireTensor]) -> PlacementTable:
        from weightlane.trace.tracing import Receiver, trace_load

        sent = [item for item in tensors if item.name not in self.ties]
        sources = [TracedSource(item.name, item.name, item.shape, item.dtype) for item in sent]
        receiver = Receiver(self.model, self.model.load_weights, TableKey("fake", "1", "A"))
        return trace_load(receiver, sources, style="plain")

    def tied(self) -> dict[str, str]:
        return self.ties

    def live_tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def begin(self, version: int) -> None:
        self.begun += 1 + version

    def load_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> int:
        with torch.no_grad():
            self.model.load_weights(tensors)
        return len(tensors)

    def finish(self, version: int) -> None:
        del version


class FakeClient:
    """vLLM's calls, handed to one worker as vLLM's worker does."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.receiver = TransferReceiver(self.engine, "worker 0")
        self.active = False
        self.versions: list[str | None] = []
        self.announced: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.announced = init_info
        self.receiver.announced(TransferInit(**init_info))

    def start_weight_update(self) -> None:
        assert not self.active, "as vLLM refuses it"
        self.receiver.start()
        self.active = True

    def update_weights(self, update_info: Any) -> None:
        assert self.active, "as vLLM refuses it"
        try:
            self.receiver.receive(TransferUpdate(**update_info))
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.receiver.finish()
        self.active = False
        self.versions.append(weight_version)


class Trainer:
    def __init__(self) -> None:
        self.tensors = {"q": torch.ones(2, 3), "k": torch.ones(2, 3), "norm": torch.ones(3)}
        self.tensors["bias"] = torch.ones(2)

    def __call__(self) -> Iterable[tuple[str, Tensor]]:
        return self.tensors.items()

    def train(self) -> None:
        for number, name in enumerate(self.tensors):
            self.tensors[name] = self.tensors[name] + number + 1


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def sender(client: FakeClient, trainer: Trainer) -> Iterator[WeightSender]:
    made = WeightSender(client, trainer, bucket_bytes=64)
    yield made
    made.close()
    client.receiver.close()


def arrived(client: FakeClient, trainer: Trainer) -> bool:
    live = client.engine.live_tensors()
    fused = torch.cat([trainer.tensors["q"], trainer.tensors["k"]])
    return (
        torch.equal(live["qk"], fused)
        and torch.equal(live["norm"], trainer.tensors["norm"])
        and torch.equal(live["bias"], trainer.tensors["bias"])
    )


def test_each_update_brings_every_tensor_in_several_buckets(
    client: FakeClient, trainer: Trainer, sender: WeightSender
) -> None:
    for version in ("1", "2"):
        trainer.train()
        assert not arrived(client, trainer)
        sender.send(version)
        assert arrived(client, trainer)
    assert client.versions == ["1", "2"]
    assert client.engine.begun == 2


def test_what_is_announced_is_plain_json_and_the_file_is_private(
    client: FakeClient, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    del sender
    assert set(client.announced) == {"tensors", "bucket_bytes", "path"}
    assert client.announced["tensors"][0] == ["q", [2, 3], "float32"]
    seen: list[int] = []
    known = transfer_receiver._of_a_sender

    def look(given: str) -> Path:
        path = known(given)
        seen.append(stat.S_IMODE(path.stat().st_mode))
        return path

    monkeypatch.setattr(transfer_receiver, "_of_a_sender", look)
    another = WeightSender(FakeClient(), Trainer())
    another.close()
    assert seen == [0o600]


def test_a_part_of_the_model_is_refused_before_anything_is_sent(client: FakeClient, trainer: Trainer) -> None:
    del trainer.tensors["bias"], trainer.tensors["k"]
    with pytest.raises(PlanError) as error:
        WeightSender(client, trainer)
    assert "bias" in str(error.value)
    assert "qk" in str(error.value)
    client.engine.problems = [Problem("capability", "quantization", "it is quantised", "Start it without.")]
    with pytest.raises(PlanError, match="quantised"):
        WeightSender(client, trainer)


def test_other_bytes_than_were_sent_are_not_loaded_and_the_next_update_heals(
    client: FakeClient, trainer: Trainer, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.train()
    honest = client.update_weights
    with monkeypatch.context() as patch:
        patch.setattr(client, "update_weights", lambda info: honest({**info, "digest": "0" * 16}))
        with pytest.raises(SyncError, match="is not what was sent"):
            sender.send()
    assert not client.active, "vLLM would refuse the next start"
    assert bool((client.engine.live_tensors()["qk"] == 0).all())
    sender.send()
    assert arrived(client, trainer)


def test_buckets_out_of_turn_and_updates_in_part_are_refused(
    client: FakeClient, trainer: Trainer, sender: WeightSender
) -> None:
    with pytest.raises(SyncError, match="An update is to be started first"):
        client.receiver.receive(TransferUpdate(0, ""))
    client.start_weight_update()
    with pytest.raises(SyncError, match="Bucket 0 was next"):
        client.update_weights({"bucket": 1, "digest": ""})
    client.start_weight_update()
    with pytest.raises(SyncError, match="0 of 4 buckets"):
        client.finish_weight_update()
    client.active = False
    sender.send()
    assert arrived(client, trainer)


def test_a_loader_that_writes_elsewhere_is_read_back(
    client: FakeClient, trainer: Trainer, sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightlane.errors import VerificationError

    del trainer
    live = client.engine.model.qk
    monkeypatch.setattr(client.engine, "finish", lambda _: live.add_(1))
    with pytest.raises(VerificationError, match="qk"):
        sender.send()


def test_a_tensor_that_the_engine_reads_through_another_loses_no_values_in_silence(
    client: FakeClient, trainer: Trainer
) -> None:
    client.engine.ties = {"head": "norm", "not-sent": "norm"}
    trainer.tensors["head"] = trainer.tensors["norm"]
    sender = WeightSender(client, trainer, bucket_bytes=16)
    sender.send("1")
    assert arrived(client, trainer)
    trainer.tensors["head"] = trainer.tensors["head"] + 1
    with pytest.raises(SyncError, match=r"head and norm came to worker 0 with different values\..*ties them"):
        sender.send("2")
    trainer.tensors["head"] = trainer.tensors["norm"].clone()
    client.active = False
    sender.send("3")
    assert client.versions == ["1", "3"]
    sender.close()


def test_only_memory_of_a_sender_is_opened(client: FakeClient, sender: WeightSender, tmp_path: Path) -> None:
    del sender
    other = tmp_path / "weightlane-transfer-x"
    other.write_bytes(b"x" * 64)
    with pytest.raises(ProtocolError, match="no memory of a sender"):
        client.init_weight_transfer_engine({**client.announced, "path": str(other)})
    with pytest.raises(ProtocolError, match="init_info"):
        client.init_weight_transfer_engine({**client.announced, "tensors": [["q", "x", 1]]})
    with pytest.raises(EngineError, match="Nothing was announced"):
        client.start_weight_update()


def test_a_closed_sender_says_so(sender: WeightSender) -> None:
    sender.close()
    sender.close()
    with pytest.raises(UsageError, match="closed"):
        sender.send()
