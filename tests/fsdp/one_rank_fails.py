"""Cases of which one fails on rank 1 alone, while rank 0 waits for it in a collective."""

from __future__ import annotations

import case_running
import torch.distributed as dist

case_running.TOGETHER_SECONDS = 2.0


def well() -> None:
    dist.barrier()


def apart() -> None:
    assert dist.get_rank() == 0, "the reason, on rank 1"
    dist.barrier()


if __name__ == "__main__":
    case_running.run({"well": well, "apart": apart, "after": well})
