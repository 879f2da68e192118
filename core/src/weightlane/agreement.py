"""Putting an outcome on the control channel, so that whoever waits for a step learns of its failure too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.failures import failure_of
from weightlane.messages import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from weightlane.control import ControlChannel


def put_outcome(channel: ControlChannel, key: str, make: Callable[[], msgspec.Struct]) -> None:
    """Puts what `make` gives under `key`, or the failure it raised or is; never raises what `make` raises.

    The rank itself learns of its failure as all others do: from the verdict that follows.
    """
    try:
        message = make()
        # It may hold what a user passed in, such as a version of a foreign type: told like its own errors.
        encode(message)
    except Exception as error:  # noqa: BLE001 - whatever it is, the ranks that wait must be told
        message = failure_of(error, origin=f"rank {channel.rank}")
    channel.put(key, message)
