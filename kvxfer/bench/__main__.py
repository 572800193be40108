"""``python -m kvxfer.bench``: the command where typer is not installed."""

import sys

from kvxfer.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
