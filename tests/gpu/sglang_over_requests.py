"""A program: what SGLang on a GPU holds and says after syncs, beside ones started from the same weights.

Servers are synced in modes full, adapter and merged by this process, on the same GPU, through their own
requests. Others are started from the same weights: as trained, with the adapter merged, and with SGLang's own
load of the adapter. Every live tensor and every place of the LoRA pool must have the same bits, and what they
say must not be told apart (`told_apart.py`), while slightly wrong adapters are. Syncs must leave the GPU's
free memory where it was; a release must free it and a sync bring it back. SGLang's own update by CUDA IPC is
timed beside. Figures go to OUT/figures.json as they come; what there was no time or no means for is among
them under `not shown`.

    python tests/gpu/sglang_over_requests.py OUT [--modes full adapter] [--seconds 330]
    python tests/gpu/sglang_over_requests.py OUT --size tiny --device cpu --engine-python PYTHON
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from run_proof import prove, status_of
from sglang_proof import MODES, SglangProof


def main() -> int:
    """0 when every check passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("--size", default="half-billion", choices=("half-billion", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--verify", default="digest", choices=("digest", "counts"))
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--engine-path", nargs="*", default=[], help="folders that servers import from first")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seconds", type=float, default=330.0, help="what is not begun by then is not shown")
    parser.set_defaults(kernels="default", tensor_parallel=1, transport=None, expected="inline")
    options = parser.parse_args()
    return status_of(options, prove(options, SglangProof))


if __name__ == "__main__":
    raise SystemExit(main())
