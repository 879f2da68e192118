"""Errors out of plugins: pluggy names nobody, so the plugin, its distribution and the hook are added here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING

from weightlane.errors import ExportError, HookError, WeightlaneError
from weightlane.stream import MovesMemory, TellsRounding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, TracebackType

    from torch import Tensor
    from typing_extensions import Self

    from weightlane.stream import ExportStream


@dataclass(frozen=True, slots=True)
class HookSite:
    """Whose hook is running."""

    plugin: str
    distribution: str
    version: str
    hook: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} of {self.distribution} {self.version}".rstrip()

    def error(self, problem: str, why: str, fix: str) -> HookError:
        """A `HookError` that names this plugin, its distribution and the hook."""
        return HookError(f"Hook {self.hook} of {self} {problem}", why, fix)


@contextmanager
def blamed_on(site: HookSite, called: Callable[[], Mapping[CodeType, HookSite]] = dict) -> Iterator[None]:
    """Turns whatever a plugin raises into a `HookError` that names it.

    An error of weightlane's own types keeps its type, since callers tell a dead engine from a bad plan by
    it; from Python 3.11 on it gets a note with the plugin instead.

    Args:
        site: whose code runs.
        called: where several plugins' code runs (wrappers around the chosen one), the sites of all by their
            code; the one that the traceback ends in is named. Asked only after a failure.
    """
    try:
        yield
    except WeightlaneError as exc:
        if sys.version_info >= (3, 11):
            culprit = _culprit(exc, site, called())
            exc.add_note(f"Raised by {culprit} in {culprit.hook}.")
        raise
    except Exception as exc:
        culprit = _culprit(exc, site, called())
        raise culprit.error(
            f"failed: {type(exc).__name__}: {str(exc).strip() or 'no message'}.",
            "The plugin raised this itself; the cause above has its traceback.",
            f"Report it to the authors of {culprit.distribution}, or pin or install another backend.",
        ) from exc


def _culprit(error: BaseException, site: HookSite, called: Mapping[CodeType, HookSite]) -> HookSite:
    frames = walk_tb(error.__traceback__)
    # An error of the chosen plugin also passes through the wrappers around it, so the innermost counts.
    return next((called[f.f_code] for f, _ in reversed(list(frames)) if f.f_code in called), site)


@dataclass(slots=True)
class _Memory:
    """Whether a stream's trainer was offloaded, and not loaded again since."""

    offloaded: bool = False


class _GuardedIterator:
    """Holds no bucket itself: the stream may reuse its storage when the next one is asked for."""

    def __init__(
        self, buckets: Iterator[Sequence[tuple[int, Tensor]]], site: HookSite, memory: _Memory
    ) -> None:
        self._buckets = buckets
        self._site = site
        self._memory = memory

    def __iter__(self) -> _GuardedIterator:
        return self

    def __next__(self) -> Sequence[tuple[int, Tensor]]:
        if self._memory.offloaded:
            raise ExportError(
                f"A bucket was asked of {self._site} after its trainer had been offloaded.",
                "A trainer is offloaded when its stream is at its end: what is left would be read from "
                "memory that it gave away.",
                "Ask for every bucket first, or take a new stream.",
            )
        with blamed_on(self._site):
            try:
                bucket = next(self._buckets)
            except StopIteration:
                bucket = None
        if bucket is None:
            raise StopIteration
        if not isinstance(bucket, Sequence):
            raise self._site.error(
                f"yielded a {type(bucket).__name__} as a bucket.",
                "A bucket is a list or tuple: what is made lazily fails later, where nobody is named.",
                f"Report it to the authors of {self._site.distribution}.",
            )
        return bucket


class GuardedStream:
    """An export stream whose errors, also those of later buckets, name the plugin that made it."""

    def __init__(self, stream: ExportStream, site: HookSite) -> None:
        self._stream = stream
        self._site = site
        self._memory = _Memory()
        with blamed_on(site):
            self.collective = stream.collective
            self.owns_storage = stream.owns_storage
            self.device = stream.device

    @property
    def update_lost(self) -> float | None:
        """What the plugin's stream tells; None from one that does not merge."""
        with blamed_on(self._site):
            return self._stream.update_lost if isinstance(self._stream, TellsRounding) else None

    def onload(self) -> None:
        """The plugin's `onload`."""
        with blamed_on(self._site):
            self._moves_memory("onload").onload()
        self._memory.offloaded = False

    def offload(self) -> None:
        """The plugin's `offload`; no bucket is given after it."""
        self._memory.offloaded = True
        with blamed_on(self._site):
            self._moves_memory("offload").offload()

    def _moves_memory(self, name: str) -> MovesMemory:
        if not isinstance(self._stream, MovesMemory):
            raise self._site.error(
                f"gave a stream without {name}().",
                f"The backend's lifecycle plans to {name}, and its streams have to do it.",
                f"Report it to the authors of {self._site.distribution}.",
            )
        return self._stream

    def __iter__(self) -> Iterator[Sequence[tuple[int, Tensor]]]:
        """The plugin's buckets."""
        with blamed_on(self._site):
            return _GuardedIterator(iter(self._stream), self._site, self._memory)

    def __enter__(self) -> Self:
        """Enters the plugin's stream."""
        with blamed_on(self._site):
            self._stream.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the plugin's stream."""
        with blamed_on(self._site):
            self._stream.__exit__(exc_type, exc, traceback)
