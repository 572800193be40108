"""What ``kvxfer doctor`` prints, and how it ends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from kvxfer.cli.options import DoctorOptions, naming_options, own_version, parse_address
from kvxfer.config import load_config
from kvxfer.doctor.examine import examine, wait_for_peers
from kvxfer.doctor.rows import Row, State, status
from kvxfer.errors import ConfigError

_WIDTH, _THING, _STATE = 80, 18, 8
_COLORS = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red", State.SKIPPED: "dim"}


def run_doctor(options: DoctorOptions) -> bool:
    with naming_options({"min_gbps": "--min-gbps"}):
        config = load_config({"min_gbps": options.min_gbps}).config
    console = Console(highlight=False, soft_wrap=True)

    def tell(endpoint: str) -> None:
        console.print(f"doctor: waits at {endpoint}; end with ctrl-C")
        console.print(f"on the other host: kvxfer doctor --peer {endpoint.removeprefix('tcp://')}")

    if options.listen:
        wait_for_peers(config, tell)
    rows: list[Row] = []
    for row in examine(config, _endpoint(options.peer)):
        rows.append(row)
        if not options.json:
            console.print(as_text(row))
    if options.json:
        print(as_json(rows))
    return status(rows) == 0


def _endpoint(peer: str | None) -> str | None:
    if peer is None:
        return None
    address = parse_address("--peer", peer.removeprefix("tcp://"))
    if not address.port:
        raise ConfigError(f"--peer: expected the port of an engine, got {peer!r}")
    return f"tcp://{address}"


def as_json(rows: Sequence[Row]) -> str:
    """One object, whose fields are documented, and only ever added to."""
    facts = {"kvxfer": own_version(), "status": status(rows), "rows": rows}
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


def as_text(row: Row) -> Text:
    """A row of the table, of 80 columns; what is longer goes on in further lines."""
    lines = textwrap.wrap(row.seen, _WIDTH - _THING - _STATE)
    if row.remedy:
        lines += textwrap.wrap(f"-> {row.remedy}", _WIDTH - _THING - _STATE)
    state = (row.state.value.ljust(_STATE), _COLORS[row.state])
    seen = f"\n{' ' * (_THING + _STATE)}".join(lines)
    return Text.assemble(f"{row.thing} ".ljust(_THING), state, seen)
