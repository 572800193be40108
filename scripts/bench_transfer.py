"""How fast scattered KV moves between two processes of one host.

--transport cuda_ipc: between two GPUs, or on one (scripts/benchmarks/device_transfer.py).
All others: in host memory, beside plain sockets and NIXL (scripts/benchmarks/host_transfer.py).
Each has its own options: --transport cuda_ipc --help, or --help.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs uninstalled

from scripts.benchmarks import device_transfer, host_transfer

DEVICE_WIRE = "cuda_ipc"


def main() -> None:
    """Look at --transport, and leave the rest to the benchmark that it names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--transport", default="all")
    options, rest = parser.parse_known_args()
    if options.transport == DEVICE_WIRE:
        raise SystemExit(device_transfer.run(rest))
    raise SystemExit(host_transfer.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
