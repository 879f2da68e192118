"""What one vLLM worker has let go of and whether its weights were lost by it, from vLLM's own records.

vLLM's allocator keeps a record of each piece of the pool: its tag, whether it is asleep, and its copy on the
host, where there is one. That tells what is released now. A sleep that somebody else called and ended between
two of our questions leaves no trace there, so the worker's `sleep` is wrapped to look in between: weights let
go without a copy are no version until a full sync has written them
(https://github.com/vllm-project/vllm/issues/29341: gibberish after a wake from level 2).

Older records (0.23) do not tell whether they are asleep. There `wake_up` is wrapped as well, and what is
released is known from the calls (`CalledSleep`).

The wrappers are put on the worker object itself, where the engine was started with sleep mode alone. To be
removed when vLLM tells whether the weights that it holds were ever written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TAGS = ("weights", "kv_cache")

_ATTRIBUTE = "_weightlane_sleep_watch"
_LOST = (
    "vLLM let its weights go without a copy (sleep level 2), and no full sync has written them since it woke."
)


_LOST_FOR_GOOD = "vLLM let its weights go without a copy (sleep level 2), and no sync writes all of them"


class SleepWatch:
    """Watches one worker; asked from the worker's own thread.

    Args:
        worker: vLLM's own worker object.
        records: gives vLLM's records of its pool, each with `tag`, `is_asleep` and `cpu_backup_tensor`.
    """

    def __init__(self, worker: Any, records: Callable[[], Iterable[Any]]) -> None:
        self._worker = worker
        self._records = records
        self._lost = False
        self._why = _LOST
        self._wrapped = False

    def apply(self) -> None:
        """Looks at the records at the end of each sleep from now on. A second call changes nothing."""
        if self._wrapped:
            return
        theirs = self._worker.sleep

        def sleep(level: int = 1) -> None:
            try:
                theirs(level=level)
            finally:
                self._slept()

        self._worker.sleep = sleep
        self._wrapped = True

    def undo(self) -> None:
        """Puts back the worker's own `sleep`. A second call changes nothing."""
        if self._wrapped:
            del self._worker.sleep  # the class's own shows again
            self._wrapped = False

    def released(self) -> tuple[str, ...]:
        """Tags of memory that is let go and not taken back."""
        asleep: set[str] = set()
        for record in self._asleep():
            asleep.add(record.tag)
            self._lost |= record.tag == "weights" and record.cpu_backup_tensor is None
        return tuple(tag for tag in TAGS if tag in asleep)

    def why_lost(self) -> str:
        """Why the weights are no version at all; "" while they are one."""
        self.released()
        return self._why if self._lost else ""

    def rewritten(self, *, but: str = "") -> None:
        """A full sync has written every tensor, or all `but` what it says: that stays lost where it was."""
        self._why = f"{_LOST_FOR_GOOD}: {but}. Start the engine again." if but else _LOST
        self._lost = self._lost and bool(but)

    def _slept(self) -> None:
        self.released()

    def _asleep(self) -> Iterable[Any]:
        return [record for record in self._records() if record.is_asleep]


class CalledSleep(SleepWatch):
    """A watch of records without `is_asleep`: a sleep lets all of them go, a wake takes its tags back.

    A call that fails half-way counts as made: nobody can say what of it was done.
    """

    def __init__(self, worker: Any, records: Callable[[], Iterable[Any]]) -> None:
        super().__init__(worker, records)
        self._tags: set[str] = set()

    def apply(self) -> None:
        """Notes what each sleep and each wake was asked for. A second call changes nothing."""
        if self._wrapped:
            return
        super().apply()
        theirs = self._worker.wake_up

        def wake_up(tags: Sequence[str] | None = None) -> None:
            theirs(tags=tags)
            self._tags -= set(self._tags if tags is None else tags)

        self._worker.wake_up = wake_up

    def undo(self) -> None:
        """Puts back the worker's own `sleep` and `wake_up`. A second call changes nothing."""
        if self._wrapped:
            del self._worker.wake_up
        super().undo()

    def _slept(self) -> None:
        self._tags = {record.tag for record in self._records()}
        self.released()

    def _asleep(self) -> Iterable[Any]:
        return [record for record in self._records() if record.tag in self._tags]


def watch_of(worker: Any) -> SleepWatch:
    """The one watch of a worker; it wraps nothing in an engine that was started without sleep mode."""
    watch: SleepWatch | None = vars(worker).get(_ATTRIBUTE)
    if watch is None:
        asked = getattr(worker.vllm_config.model_config, "enable_sleep_mode", False)
        if asked:
            watch = (SleepWatch if records_are_kept() else CalledSleep)(worker, _pool)
            watch.apply()
        else:
            watch = SleepWatch(worker, tuple)
        setattr(worker, _ATTRIBUTE, watch)
    return watch


def share_watch(worker: Any, other: Any) -> None:
    """Has `other`, which stands for the same worker, ask the one watch that is on `worker`."""
    setattr(other, _ATTRIBUTE, watch_of(worker))


def records_are_kept() -> bool:
    """Whether this vLLM's records have the three fields that are looked at."""
    from vllm import device_allocator

    record: Any = getattr(device_allocator, "AllocationData", None)
    if record is None:
        from vllm.device_allocator import cumem

        record = cumem.AllocationData  # its place before 0.27
    return {"tag", "is_asleep", "cpu_backup_tensor"} <= set(record.__dataclass_fields__)


def _pool() -> Iterable[Any]:
    from vllm import device_allocator

    instance = getattr(device_allocator, "get_mem_allocator_instance", None)
    if instance is None:
        from vllm.device_allocator.cumem import CuMemAllocator

        instance = CuMemAllocator.get_instance
    allocator: Any = instance()
    return tuple(allocator.pointer_to_data.values())
