"""What the ends of one NIXL pipe have in common: its agent, the peers it knows, its staging."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import torch

from kvxfer.config import Config
from kvxfer.transports.base import Wake
from kvxfer.transports.native_peers import net_devices
from kvxfer.transports.nixl_agent import Area, NixlAgent
from kvxfer.transports.pipe import Slots
from kvxfer.transports.staging import make_staging
from kvxfer.transports.wake_up import Alarm


class Staging:
    """Registered memory, by slots. Raises TransportUnavailable."""

    def __init__(self, host: NixlHost, slots: Slots) -> None:
        self.slots = slots
        self._agent = host.agent
        with host.on_device():
            self.memory = make_staging(slots.nbytes, host.device)
            if self.memory.is_cuda:
                torch.cuda.current_stream(host.device).synchronize()  # it is zeroed
            self.area = Area.of(self.memory)
            self._registered = self._agent.register(self.area)
        nbytes = slots.slot_nbytes
        self.parts = [self.memory[n * nbytes :][:nbytes] for n in range(slots.num_slots)]

    def metadata(self) -> bytes:
        """For who is to reach it."""
        return self._agent.metadata(self._registered)

    def slot(self, slot: int, nbytes: int) -> Area:
        """The beginning of one."""
        return self.area.part(slot * self.slots.slot_nbytes, nbytes)

    def deregister(self) -> None:
        """Peers cannot reach it any more, where the hardware asks for a registration."""
        self._agent.deregister(self._registered)

    def give_back(self) -> None:
        """Nobody reaches it. The memory goes with its last tensor."""
        self.deregister()
        del self.memory, self.parts


class NixlHost:
    """Raises TransportUnavailable: what is missing, and what to install."""

    def __init__(self, device: torch.device, config: Config, wake: Wake) -> None:
        self.device = device
        with self.on_device():
            self.agent = NixlAgent(net_devices(config))
        self.alarm = Alarm(wake)
        self._peers: Counter[str] = Counter()
        self._kept: list[Staging] = []

    def on_device(self) -> AbstractContextManager[object]:
        """UCX finds the memory's GPU by the context that is current."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def add_peer(self, metadata: bytes) -> str:
        """Connections to one agent share what is known of it. Raises PipeBroken."""
        for peer in [peer for peer, num_ends in self._peers.items() if not num_ends]:
            if not self.agent.notify(peer, b""):
                del self._peers[peer]
                self.agent.remove_peer(peer)
        peer = self.agent.add_peer(metadata)
        self._peers[peer] += 1
        return peer

    def remove_peer(self, peer: str) -> None:
        """After its last connection it stays known until it cannot be reached any more: UCX 1.23
        leaves a socket open for each time that a living peer is forgotten.
        """
        self._peers[peer] -= 1

    def staging_to_reach(self, slots: Slots) -> Staging:
        """For a peer to read or write; some that was kept if there is any. Raises
        TransportUnavailable.
        """
        for staging in self._kept:
            if staging.slots == slots:
                self._kept.remove(staging)
                return staging
        return Staging(self, slots)

    def keep(self, staging: Staging) -> None:
        """For another peer: it stays registered where it is, so what a peer knows of an address
        does not change.
        """
        self._kept.append(staging)

    def close(self) -> None:
        """Nothing goes on any more."""
        self.alarm.close()
        for staging in self._kept:
            staging.deregister()
        self.agent.close()
        self._kept = []  # after the agent: over TCP it reads for peers without asking
