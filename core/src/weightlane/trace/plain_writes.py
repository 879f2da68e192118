"""Sees operators without a stand-in on the loader's thread and on those that it starts."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from weightlane.trace.stand_ins import StandIn, stand_ins_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from weightlane.trace.dispatch import Dispatcher


class PlainWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands operators to the rules of `dispatcher`, on the thread that entered it, until its run is over.

    `used`: that thread has carried out any.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports all of torch._dynamo: seconds, for nothing

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dispatcher = dispatcher
        self.used = False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """With a stand-in or without."""
        given = kwargs or {}
        self.used = True
        if self.dispatcher.over:
            # A thread that outlives the load that started it, such as one of a pool that is kept, writes for
            # later loads; a stand-in that it still has says itself that its trace is over.
            return func(*args, **given)
        if (args and type(args[0]) is StandIn) or stand_ins_in(args, given):
            return self.dispatcher.with_stand_ins(func, args, given)
        return self.dispatcher.without_stand_ins(func, args, given)


@contextmanager
def plain_writes_seen(dispatcher: Dispatcher) -> Iterator[None]:
    """On this thread, and on every thread that this one or one of those starts meanwhile.

    A mode is seen by one thread only, and loaders use pools. Threads that others start are left alone.
    """
    mode = PlainWrites(dispatcher)
    dispatcher.threads.add(threading.get_ident())
    _FOLLOWED.append(dispatcher)
    _patch()
    try:
        with mode:
            yield
        _wait_for_threads(dispatcher)
    finally:
        dispatcher.over = True
        _FOLLOWED.remove(dispatcher)
        _unpatch()
        dispatcher.threads.clear()


def _wait_for_threads(dispatcher: Dispatcher) -> None:
    """Notes those that carried out operators and go on, however short a while they are waited for."""
    until = time.monotonic() + _SECONDS_TO_END
    for thread, mode in dispatcher.followed:
        if mode.used:  # one that has nothing to do with tensors, such as that of a progress bar, may go on
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                dispatcher.outlived(thread.name)


_SECONDS_TO_END = 1.0
_FOLLOWED: list[Dispatcher] = []
_STARTS: list[Callable[[threading.Thread], None]] = []  # what stood there when the first trace began
_LOCK = threading.Lock()  # bounded by what is done under it: a list and a function are exchanged


def _patch() -> None:
    with _LOCK:
        if not _STARTS:
            _STARTS.append(threading.Thread.start)
            threading.Thread.start = _start_followed  # type: ignore[method-assign,assignment]


def _unpatch() -> None:
    with _LOCK:
        if not _FOLLOWED:
            threading.Thread.start = _STARTS.pop()  # type: ignore[method-assign,assignment]


def _start_followed(thread: threading.Thread) -> None:
    own = threading.get_ident()
    with _LOCK:
        start = _STARTS[0] if _STARTS else threading.Thread.start
    dispatcher = next((item for item in _FOLLOWED if own in item.threads), None)
    if dispatcher is not None:
        mode = PlainWrites(dispatcher)
        dispatcher.followed.append((thread, mode))
        thread.run = _followed(thread.run, mode)  # type: ignore[method-assign]
    start(thread)


def _followed(run: Callable[[], None], mode: PlainWrites) -> Callable[[], None]:
    dispatcher = mode.dispatcher

    def followed() -> None:
        own = threading.get_ident()
        dispatcher.threads.add(own)
        dispatcher.parallel = True
        # Not entered: entering notes global state, which threads that end in another order would leave wrong.
        _push_mode(mode)
        try:
            run()
        finally:
            _pop_mode()
            dispatcher.threads.discard(own)

    return followed
