"""Tensors in the form that SGLang's unpickler takes: (name, tensor) pairs, or a dictionary, pickled, base64.

The pickle goes towards an engine that demands one; nothing pickled is ever read back. Tensors are plain, on
the CPU and on storage of their own: a view would take its whole storage along.
"""

from __future__ import annotations

import binascii
import io
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_PIECE = 3 << 18
"""Bytes encoded at a time: a multiple of three, so that the encoded pieces join without padding."""

_PROTOCOL = 4


class PayloadPlace(NamedTuple):
    """Where a request carries tensors: the field, and how many times its list holds them; 0 for no list."""

    field: str
    copies: int


class EncodedBucket:
    """One bucket as base64 pieces, made once and sent once per tensor-parallel rank.

    `nbytes` is the length of the base64 text. Peak memory is that text, 4/3 of the bucket, and one tensor.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]] | Mapping[str, Tensor]) -> None:
        self.pieces: list[bytes] = []
        sink = _Base64Sink(self.pieces)
        _pickle_into(sink, tensors)
        sink.finish()
        self.nbytes = sum(len(piece) for piece in self.pieces)


def pickled(tensors: Sequence[tuple[str, Tensor]] | Mapping[str, Tensor]) -> bytes:
    """The same pickle as it is, for a receiver that is handed bytes."""
    sink = io.BytesIO()
    _pickle_into(sink, tensors)
    return sink.getvalue()


def _pickle_into(sink: Any, tensors: Sequence[tuple[str, Tensor]] | Mapping[str, Tensor]) -> None:
    pickler = _TensorPickler(sink, _PROTOCOL)
    pickler.fast = True  # no memo: it would keep a copy of every tensor until the end
    # An update reads pairs, a load of an adapter a dictionary.
    pickler.dump(dict(tensors) if isinstance(tensors, Mapping) else list(tensors))


def request_body(bucket: EncodedBucket, *, field: str, copies: int, body: str) -> tuple[int, Iterator[bytes]]:
    """(length, pieces) of a JSON object: the fields of `body`, and `field` holding `copies` times the bucket.

    Args:
        bucket: what every copy is.
        field: name of the payload field.
        copies: entries of its list; 0 for the bucket itself in place of a list.
        body: a JSON object without that field.
    """
    rest = body.strip()[1:].lstrip()
    opened, closed = ("[", "]") if copies else ("", "")
    payloads = copies or 1
    head = f'{{"{field}":{opened}'.encode()
    tail = (closed + ("," if rest != "}" else "") + rest).encode()
    length = len(head) + len(tail) + payloads * (bucket.nbytes + 2) + payloads - 1

    def pieces() -> Iterator[bytes]:
        yield head
        for number in range(payloads):
            yield b'"' if number == 0 else b',"'
            yield from bucket.pieces
            yield b'"'
        yield tail

    return length, pieces()


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        return compact(obj).__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]


def compact(tensor: Tensor) -> Tensor:
    """The tensor as a plain CPU tensor whose storage holds it and nothing else; itself where it is one."""
    import torch

    plain = tensor.detach().to("cpu").contiguous()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain


class _Base64Sink(io.RawIOBase):
    """A file that keeps what is written as base64 pieces; large writes are encoded without another copy."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        taken = 0
        if self._pending:
            taken = min(-len(self._pending) % _PIECE, len(view))
            self._pending += view[:taken]
            self._flush_whole()
        while len(view) - taken >= _PIECE:
            self._encode(view[taken : taken + _PIECE])
            taken += _PIECE
        self._pending += view[taken:]
        return len(view)

    def finish(self) -> None:
        """Encodes what is left, with padding."""
        if self._pending:
            self._encode(self._pending)
            self._pending.clear()

    def _flush_whole(self) -> None:
        if len(self._pending) == _PIECE:
            self._encode(self._pending)
            self._pending.clear()

    def _encode(self, data: Any) -> None:
        self._pieces.append(binascii.b2a_base64(data, newline=False))
