"""`python -m weightlane.reference.server --model DIR --address unix:/path`: the engine in its own process."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from weightlane.errors import WeightlaneError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Loads the model and serves it until told to shut down; 1 with the reason on stderr when it cannot."""
    parser = argparse.ArgumentParser(prog="weightlane.reference.server", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--address", required=True, help="unix:/path, or tcp:127.0.0.1:port with a key")
    parser.add_argument("--dtype", default="float32", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="a torch device")
    parser.add_argument("--adapter-slots", type=int, default=0, help="adapters held at once; 0 for no limit")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    options = parser.parse_args(argv)
    from weightlane.front.server import serve_front

    try:
        from weightlane.reference.engine import ReferenceEngine

        engine = ReferenceEngine(
            options.model,
            dtype=options.dtype,
            device=options.device,
            adapter_slots=options.adapter_slots,
        )
        if options.threads > 0:
            import torch

            torch.set_num_threads(options.threads)
        serve_front(engine, options.address)
    except WeightlaneError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
