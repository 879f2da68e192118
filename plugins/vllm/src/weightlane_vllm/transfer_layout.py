"""What both ends of our weight-transfer backend know: the tensors, their buckets and the memory they share.

All of it travels as plain JSON in vLLM's own `init_info` and `update_info`. The memory is one private file,
made once and used for every bucket of every update: vLLM answers an update when its workers have loaded it,
and only then is the next bucket written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlane.buckets import DEFAULT_BUCKET_BYTES, lay_out_buckets
from weightlane.errors import ProtocolError
from weightlane.messages import WireTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightlane.buckets import BucketLayout

BACKEND = "weightlane"
"""The word for `weight_transfer_config={"backend": ...}`."""


@dataclass(frozen=True, slots=True)
class TransferLayout:
    """Tensors by canonical name, in their order, and the buckets that they travel in."""

    tensors: tuple[WireTensor, ...]
    bucket_bytes: int
    buckets: tuple[BucketLayout, ...]

    @classmethod
    def of(cls, tensors: Sequence[WireTensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> TransferLayout:
        """The layout of an update that sends `tensors`."""
        given = tuple(tensors)
        return cls(given, bucket_bytes, lay_out_buckets(given, bucket_bytes=bucket_bytes, slots=1))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that every bucket fits in."""
        return max(1, *(layout.nbytes for layout in self.buckets))

    def as_json(self) -> dict[str, Any]:
        """For `init_info`."""
        told = [[item.name, list(item.shape), item.dtype] for item in self.tensors]
        return {"tensors": told, "bucket_bytes": self.bucket_bytes}


def layout_of_json(tensors: object, bucket_bytes: object) -> TransferLayout:
    """The layout that the sender told.

    Raises:
        ProtocolError: it is no list of (name, shape, dtype), or the number of bytes is none.
    """
    import msgspec

    try:
        given = msgspec.convert(tensors, list[tuple[str, tuple[int, ...], str]])
        nbytes = msgspec.convert(bucket_bytes, int)
        made = [WireTensor(name, shape, dtype) for name, shape, dtype in given]
        return TransferLayout.of(made, nbytes)
    except (msgspec.ValidationError, KeyError) as error:
        raise ProtocolError(
            f"The init_info of backend {BACKEND} cannot be read.",
            f"{type(error).__name__}: {error}.",
            "Send with weightlane_vllm.transfer_sender.WeightSender of the same version.",
        ) from error
