"""Which users listen at an address of this host, as Linux tells it.

Anybody on a host can listen on its loopback, so an address there says nothing of who answers. Linux
shows the owner of each TCP socket of this network namespace in ``/proc/net/tcp`` and ``tcp6``.
"""

from __future__ import annotations

import ipaddress
import struct
from pathlib import Path

from kvxfer.transfer.manifest import parse_endpoint

NOBODY_KNOWN = frozenset({-1})
"""Where it cannot be looked up: names but ``localhost``, and where there is no ``/proc``."""

_PATHS = {4: Path("/proc/net/tcp"), 6: Path("/proc/net/tcp6")}
_LISTEN = b"0A"
Table = dict[bytes, frozenset[int]]
"""Users by local address, written as in the table."""


class Listeners:
    """The listeners of this host at one moment; each table is read when it is first asked for."""

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}

    def users(self, endpoint: str) -> frozenset[int]:
        """The ids of the users that listen at exactly this ``tcp://host:port``; none if nobody
        does.
        """
        try:
            host, port = parse_endpoint(endpoint)
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
            if address.version not in self._tables:
                self._tables[address.version] = _read_table(_PATHS[address.version])
        except (ValueError, OSError):
            return NOBODY_KNOWN
        words = struct.unpack(f"={len(address.packed) // 4}I", address.packed)
        local = b"".join(b"%08X" % word for word in words) + b":%04X" % port
        return self._tables[address.version].get(local, frozenset())


def _read_table(path: Path) -> Table:
    """Listeners come first; to find the connections behind them takes the kernel milliseconds,
    however few there are.
    """
    table: Table = {}
    with path.open("rb", buffering=0) as file:
        while rows := file.read(4096):  # whole ones
            for row in rows.splitlines():
                # Number, local and remote address, state, queues, timer, retransmits, user, ...
                _, local, _, state, _, _, _, user, *_ = row.split()
                if state == _LISTEN:
                    table[local] = table.get(local, frozenset()) | {int(user)}
            if state not in (_LISTEN, b"st"):  # that of the table's head
                break
    return table
