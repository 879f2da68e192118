"""Which GPU a device of this process is: numbers differ between processes, UUIDs do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlane.errors import ProtocolError

if TYPE_CHECKING:
    import torch


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, "" of any other and where this torch (before 2.4) does not tell."""
    if device.type != "cuda":
        return ""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def device_with(uuid: str) -> torch.device:
    """This process's device of that UUID.

    Raises:
        ProtocolError: this process sees none such.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", number) for number in range(count)]
    seen = [gpu_uuid(device) for device in devices]
    if uuid not in seen:
        raise ProtocolError(
            f"GPU {uuid} is not visible in this process.",
            f"It sees {', '.join(seen) or 'none'}.",
            "Start trainer rank and worker with the same GPU in CUDA_VISIBLE_DEVICES, or connect with "
            "transport='shm'.",
        )
    return devices[seen.index(uuid)]
