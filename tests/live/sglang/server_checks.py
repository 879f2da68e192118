"""What the live tests ask of a traced server: its tables, its tensors' checksums, what an oracle says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

from weightlane.messages import WireTensor, encode
from weightlane.trace.table import Untraced
from weightlane_sglang.loader_channel import carry
from weightlane_sglang.loader_messages import TraceLoad

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightlane.trace.table import PlacementTable
    from weightlane_sglang.endpoint import SglangEndpoint

SECONDS = 120.0
BESIDE_SECONDS = 0.2
PROMPTS = ((1, 2, 3, 4, 5), (400, 7, 99), (17, 250, 33, 8, 120, 64, 3))


def sources(endpoint: SglangEndpoint) -> tuple[WireTensor, ...]:
    """What a whole load of the server's checkpoint is."""
    (worker,) = endpoint.describe_workers("sglang")
    return tuple(
        WireTensor(item.name, item.shape, item.dtype) for item in worker.expected if not item.tied_to
    )


def traced(endpoint: SglangEndpoint, tensors: tuple[WireTensor, ...] = ()) -> tuple[PlacementTable, ...]:
    """The tables of all ranks; fails where there are none."""
    tables = endpoint.trace_workers(tensors or sources(endpoint), SECONDS)
    assert not isinstance(tables, Untraced), tables.reason
    return tables


@contextmanager
def traced_beside(endpoint: SglangEndpoint) -> Iterator[None]:
    """Traces now and then while the block runs; fails where one trace differs, fails or is not made."""

    def digests() -> list[str]:
        return [table.digest() for table in traced(endpoint)]

    first, over = digests(), Event()

    def trace_now_and_then() -> int:
        count = 0
        while not over.wait(BESIDE_SECONDS):
            assert digests() == first
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        traces = pool.submit(trace_now_and_then)
        try:
            yield
        finally:
            over.set()
        made = traces.result(SECONDS)
    assert made >= 3, "too few to show anything"


def told_by(endpoint: SglangEndpoint, loader: str, message: bytes = b"\0") -> list[Any]:
    """What one of the tests' own loaders answers, for each rank."""
    found = carry(
        endpoint._channel,
        endpoint.facts(),
        message,
        loader=f"live_loaders.{loader}",
        timeout_seconds=SECONDS,
    )
    assert None not in found, "the server's log tells why"
    answers = [json.loads(item or b"") for item in found]
    for answer in answers:
        assert not isinstance(answer, dict) or "error" not in answer, answer["error"]
    return answers


def differences_from_the_oracle(endpoint: SglangEndpoint) -> list[list[str]]:
    """For each rank, where a load of numbered tensors differs from what its trace says."""
    return told_by(endpoint, "oracle", encode(TraceLoad(sources(endpoint))))


def assert_undisturbed(endpoint: SglangEndpoint, traces: int) -> None:
    """Traces many times: the tables, the model's tensors and objects, outputs and version stay the same."""
    endpoint.generate(PROMPTS, max_tokens=8)  # the caches are warm then, before as after
    said, held = endpoint.generate(PROMPTS, max_tokens=8), told_by(endpoint, "checksums")
    version = endpoint.describe_workers("sglang")[0].held_version
    assert endpoint.generate(PROMPTS, max_tokens=8) == said, "a control: the server repeats itself exactly"
    tensors = sources(endpoint)
    first = [table.digest() for table in traced(endpoint, tensors)]
    for _ in range(traces - 1):
        again = traced(endpoint, tensors)
    assert [table.digest() for table in again] == first
    assert told_by(endpoint, "checksums") == held
    assert endpoint.generate(PROMPTS, max_tokens=8) == said
    assert endpoint.describe_workers("sglang")[0].held_version == version
