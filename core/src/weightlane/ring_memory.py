"""The memory of a ring: a header of 64-bit words and two texts, then the slots.

No word is touched before the file is known to be whole: touching what was cut off would end the process.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from weightlane.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from weightlane.buckets import BucketLayout
    from weightlane.ring_file import PrivateFile

HEADER_BYTES = 4096
FIRST_SLOT_WORD = 16
SENDER_TEXT, RECEIVER_TEXT = 1024, 2560
_TEXT_BYTES = 1536
_SERIAL_SHIFT = 24
_MOST_BEATS = (1 << 62) - 1


def serial_of(sync: int, bucket: int) -> int:
    """What a slot's words hold when this bucket of this sync was posted there, or released."""
    return (sync << _SERIAL_SHIFT) | (bucket + 1)


def named(serial: int) -> str:
    """A slot's word in words."""
    return f"bucket {(serial & ((1 << _SERIAL_SHIFT) - 1)) - 1} of sync {serial >> _SERIAL_SHIFT}"


class Ring:
    """What both ends do with the mapped file; `RingWriter` and `RingReader` are the ends."""

    def __init__(self, file: PrivateFile, slot_sizes: Sequence[int]) -> None:
        self.path = file.path
        self._file = file
        self._map = file.memory
        self._starts = tuple(HEADER_BYTES + sum(slot_sizes[:index]) for index in range(len(slot_sizes)))
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        # Bounded by what its holders do: to write a word, or to unmap.
        self._closing = threading.Lock()
        self._closed = False

    def slot_memory(self, layout: BucketLayout) -> memoryview:
        """The bytes of this bucket in its slot."""
        start = self._starts[layout.slot]
        return memoryview(self._map)[start : start + layout.nbytes]

    def slot_tensor(self, layout: BucketLayout) -> Tensor:
        """The same bytes as a uint8 tensor of shape (nbytes,) that shares the ring's memory."""
        import torch

        if layout.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Over a memoryview, which the tensor keeps and which keeps the mapping from being closed. Over the
        # mapping itself torch lets go of the buffer at once, and close() would unmap what the tensor reads.
        return torch.frombuffer(
            memoryview(self._map), dtype=torch.uint8, count=layout.nbytes, offset=self._starts[layout.slot]
        )

    def _word(self, word: int) -> int:
        self._file.require_whole()
        return self._words[word]

    def _set_word(self, word: int, value: int) -> None:
        self._file.require_whole()
        self._words[word] = value

    def _posted(self, slot: int) -> int:
        return self._word(FIRST_SLOT_WORD + 2 * slot)

    def _released(self, slot: int) -> int:
        return self._word(FIRST_SLOT_WORD + 2 * slot + 1)

    def _write_text(self, offset: int, text: str) -> None:
        self._file.require_whole()
        data = text.encode(errors="replace")[: _TEXT_BYTES - 8]
        memory = memoryview(self._map)
        memory[offset : offset + 8] = len(data).to_bytes(8, "little")
        memory[offset + 8 : offset + 8 + len(data)] = data

    def _read_text(self, offset: int) -> str:
        self._file.require_whole()
        length = min(int.from_bytes(self._map[offset : offset + 8], "little"), _TEXT_BYTES - 8)
        return self._map[offset + 8 : offset + 8 + length].decode(errors="replace")

    def _beat(self, word: int) -> None:
        # From a thread, whose last beat may come after close(). That a file was cut, the main thread tells.
        with self._closing, contextlib.suppress(ProtocolError):
            if not self._closed:
                self._set_word(word, (self._word(word) + 1) & _MOST_BEATS)

    def close(self) -> None:
        """Unmaps; a view still held by someone keeps its pages until it is dropped. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._words.release()
                self._file.close()
