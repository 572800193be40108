"""For tests of wires and of what is above them; nothing that serves imports it.

``check_transport`` is the conformance check of a wire, ``kvxfer.testing.faults`` makes wires
misbehave.
"""

from __future__ import annotations

from kvxfer.testing.conformance import check_transport
from kvxfer.testing.peers import MakeSink, MakeSource

__all__ = ["MakeSink", "MakeSource", "check_transport"]
