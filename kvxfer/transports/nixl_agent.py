"""What kvxfer uses of NIXL, typed: one agent with its UCX plugin.

NIXL's own errors have no common base and become PipeBroken here. An agent is for one thread. It
brings its own UCX, which may be loaded in one process beside another UCX.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch

from kvxfer.config import variables_kept, variables_of
from kvxfer.errors import TransportUnavailable
from kvxfer.extras import install
from kvxfer.transports.pipe import PipeBroken

Operation = Literal["READ", "WRITE"]
_log = logging.getLogger("kvxfer.transports")
_Foreign: TypeAlias = Any
"""An object of NIXL's bindings, which have no types."""

PROGRESS_DELAY_US = 100_000
"""What UCX does for a peer (connect, serve a read over TCP) it does on a thread of NIXL's, which
sleeps on UCX's descriptors and looks after so long at the latest: 0.05 % of a core when nothing
happens. NIXL's Python classes can only start that thread with 0, which looks without a pause and
takes a whole core; with none at all a peer gets nothing while this process computes.
"""


_Count = Annotated[int, msgspec.Meta(ge=0)]
MOST_ADDRESS = 1 << 64
_AGENT = re.compile(rb"kvxfer-[0-9a-f]{32}")
"""What agents are called: NIXL gives notes away by name, as text."""


class Area(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory, or a part of it. ``device``: which GPU, for VRAM."""

    address: _Count
    nbytes: _Count
    device: _Count
    kind: Literal["DRAM", "VRAM"]

    @classmethod
    def of(cls, memory: torch.Tensor) -> Area:
        kind: Literal["DRAM", "VRAM"] = "DRAM" if memory.device.type == "cpu" else "VRAM"
        return cls(memory.data_ptr(), memory.numel(), memory.device.index or 0, kind)

    def part(self, begin: int, nbytes: int) -> Area:
        return Area(self.address + begin, nbytes, self.device, self.kind)


class Request:
    """One READ or WRITE; it may be posted again when it is done. Raises PipeBroken."""

    __slots__ = ("_agent", "_handle", "_nixl")

    def __init__(self, nixl: _Library, agent: _Foreign, handle: int) -> None:
        self._nixl, self._agent, self._handle = nixl, agent, handle

    def post(self) -> bool:
        """True if it is done already, as on one host, where this process copies by itself."""
        return self._state(self._agent.postXferReq)

    def is_done(self) -> bool:
        """Whether the transfer is done; also drives it. Not to be called after it has failed."""
        return self._state(self._agent.getXferStatus)

    def _state(self, ask: Callable[[int], object]) -> bool:
        nixl = self._nixl
        try:
            state = ask(self._handle)
        except nixl.errors as exc:
            raise PipeBroken(f"nixl: expected a transfer to go on, got {exc!r}") from exc
        if state == nixl.done:
            return True
        if state != nixl.going_on:
            raise PipeBroken(f"nixl: expected a transfer to go on, got {state}")
        return False

    def release(self) -> None:
        """It is done or has failed, and will not be posted again."""
        try:
            self._agent.releaseXferReq(self._handle)
        except self._nixl.errors as exc:
            _log.warning("nixl: a request cannot be released, and its memory is lost: %r", exc)


class _Library:
    """NIXL's Python bindings, imported when first needed. Raises TransportUnavailable."""

    def __init__(self) -> None:
        try:
            self.bindings: Any = import_module("nixl._bindings")
        except ImportError as exc:
            raise TransportUnavailable(
                f"nixl: expected the package nixl, got {exc}; {install('nixl')}"
            ) from exc
        names = [name for name in dir(self.bindings) if name.endswith("Error")]
        self.errors = tuple(getattr(self.bindings, name) for name in names)
        self.done = self.bindings.NIXL_SUCCESS
        self.going_on = self.bindings.NIXL_IN_PROG
        self.operations = {"READ": self.bindings.NIXL_READ, "WRITE": self.bindings.NIXL_WRITE}
        self.kinds = {"DRAM": self.bindings.DRAM_SEG, "VRAM": self.bindings.VRAM_SEG}


class NixlAgent:
    """Registered memory, the peers that are known, and requests between them.

    Making one takes 70 to 500 ms. Raises TransportUnavailable.
    """

    def __init__(self, net_devices: Sequence[str]) -> None:
        """``net_devices``: what UCX may use of the network; none: what is usual for it."""
        self._nixl = nixl = _Library()
        bindings = nixl.bindings
        settings = bindings.nixlAgentConfig()
        settings.useProgThread = True
        settings.pthrDelay = PROGRESS_DELAY_US
        try:
            self._agent: Any = bindings.nixlAgent(f"kvxfer-{secrets.token_hex(16)}", settings)
            self._backends = [self._create_backend(net_devices)]
        except nixl.errors as exc:
            raise TransportUnavailable(f"nixl: expected its UCX plugin, got {exc!r}") from exc

    def _create_backend(self, net_devices: Sequence[str]) -> _Foreign:
        # As for the wire ``ucx``: else UCX may not survive a peer that dies while it connects. Not
        # by a variable: to write one for each agent made others fail that looked at them
        chosen = {} if "UCX_TCP_CONN_NB" in variables_of("UCX_") else {"TCP_CONN_NB": "y"}
        defaults = {}
        if len(net_devices) == 1:
            chosen["NET_DEVICES"] = net_devices[0]
        elif net_devices:  # a comma ends a setting of that list
            defaults["UCX_NET_DEVICES"] = ",".join(net_devices)
        settings = ",".join(f"{name}={value}" for name, value in chosen.items())
        with variables_kept("UCX_", **defaults):
            return self._agent.createBackend("UCX", {"engine_config": settings} if chosen else {})

    def register(self, area: Area) -> _Foreign:
        """``deregister`` gets what this returns. Raises TransportUnavailable."""
        descriptor = (area.address, area.nbytes, area.device, "")
        registered = self._nixl.bindings.nixlRegDList(self._nixl.kinds[area.kind], [descriptor])
        try:
            self._agent.registerMem(registered, self._backends)
        except self._nixl.errors as exc:
            raise TransportUnavailable(
                f"nixl: expected to register {area.nbytes} bytes of {area.kind}, got {exc!r}"
            ) from exc
        return registered

    def deregister(self, registered: _Foreign) -> None:
        self._agent.deregisterMem(registered, self._backends)

    def metadata(self, registered: _Foreign | None = None) -> bytes:
        if registered is None:
            registered = self._nixl.bindings.nixlRegDList(self._nixl.kinds["DRAM"])
        return bytes(self._agent.getLocalPartialMD(registered, True, self._backends))

    def add_peer(self, metadata: bytes) -> str:
        """Connect to the agent of this metadata; returns its name. Raises PipeBroken."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as exc:  # NIXL's, or what C++ throws at bytes that it cannot read
            raise PipeBroken(f"nixl: expected metadata of an agent, got {exc!r}") from exc
        if not _AGENT.fullmatch(name):
            self._agent.invalidateRemoteMD(name)
            raise PipeBroken(f"nixl: expected an agent of kvxfer's, got {name[:64]!r}")
        return str(name, "ascii")

    def remove_peer(self, peer: str) -> None:
        self._agent.invalidateRemoteMD(peer)

    def request(self, operation: Operation, own: Area, peer: str, theirs: Area) -> Request:
        """From or to ``own``; both registered, of one size. Raises PipeBroken."""
        nixl = self._nixl
        sides = [
            nixl.bindings.nixlXferDList(nixl.kinds[a.kind], [(a.address, a.nbytes, a.device)])
            for a in (own, theirs)
        ]
        kind = nixl.operations[operation]
        try:
            handle = self._agent.createXferReq(kind, *sides, peer, b"", self._backends)
        except nixl.errors as exc:
            raise PipeBroken(f"nixl: expected {theirs} of {peer}, got {exc!r}") from exc
        return Request(nixl, self._agent, handle)

    def notify(self, peer: str, note: bytes) -> bool:
        """A few bytes for another agent. False if it cannot be reached any more."""
        try:
            self._agent.genNotif(peer, note)
        except self._nixl.errors:
            return False
        return True

    def notes(self) -> list[tuple[str, bytes]]:
        try:
            found = self._agent.getNotifs({}, self._backends)
        except UnicodeDecodeError as exc:  # not from an agent of ours; the others' went with it
            _log.warning("nixl: notes were lost: one names an agent that is none: %s", exc)
            return []
        return [(str(peer), bytes(note)) for peer, notes in found.items() for note in notes]

    def close(self) -> None:
        del self._agent
