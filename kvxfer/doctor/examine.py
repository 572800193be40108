"""The order in which ``kvxfer doctor`` looks at things. Every step has a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import NoReturn

import torch
from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.connector.peer_session import Failure
from kvxfer.connector.worker_side import HOST
from kvxfer.doctor import engines, gpus, host, rows
from kvxfer.doctor.child import Child, call
from kvxfer.doctor.engines import Choices
from kvxfer.doctor.rows import Row, State
from kvxfer.errors import ConfigError, PeerLost
from kvxfer.extras import install
from kvxfer.tensors.shared_memory import boot_id
from kvxfer.transfer.manifest import CudaIpcHandle, EngineManifest, MemfdHandle, parse_endpoint
from kvxfer.transfer.wire import Reason
from kvxfer.transports.channel import bind_address
from kvxfer.transports.key_folder import with_folder_keys
from kvxfer.transports.registry import AUTO, OPTIONAL

_GPUS_S = 60.0
"""To look at them, and to compile a copy."""
WAIT_S = 30.0
"""Until an engine listens."""
_HANDLES = {"shm": MemfdHandle, "cuda_ipc": CudaIpcHandle}

_Met = tuple[str, int] | None
"""The endpoint of an engine, and how many ranks it has."""


def examine(config: Config, peer: str | None) -> Iterator[Row]:
    """All rows, each when it is known. ``peer``: ``tcp://host:port`` of an engine, or of a doctor
    that waits; None: each wire is tried between two processes of this host.
    """
    try:
        address = bind_address(config.host)
    except ConfigError as exc:
        yield rows.failed_row("host", State.FAIL, str(exc), "name an address of this machine")
        return
    if not host.is_of_this_machine(address):
        seen = f"expected an address of this machine, got {config.host}"
        yield Row("host", State.FAIL, seen, "name the address of one of its interfaces")
        return
    try:
        config = with_folder_keys(config)
    except ConfigError as exc:
        yield rows.failed_row("keys", State.FAIL, str(exc), "see kvxfer keys")
        return
    yield from host.limits()
    ports = config.for_engine(gives_kv=peer is None, num_ranks=1).for_rank(0)
    for wanted in (ports.control_ports, ports.data_ports):
        problems = {port: host.why_not_free(address, port) for port in wanted.in_order}
        problem = "" if "" in problems.values() else problems[wanted.first]
        owner = host.listener_on(wanted.first) if problem else ""
        yield rows.port_row(address, wanted.name, f"{wanted}", problem, owner)
    config = replace(config, port=0, data_port=0)  # an engine in service may have the others
    for wire in host.LIBRARIES:
        how = install(host.EXTRAS.get(wire, wire))
        yield rows.library_row(wire, host.versions(wire), how)
    found = call(config, _GPUS_S, gpus.looking)
    yield from _gpu_rows(config, found)
    device = torch.device("cuda", 0) if found and not isinstance(found, Failure) else HOST
    if peer is not None:
        yield from _try_peer(config, peer, device)
        return
    # Both engines have this host's address and keys, whoever else they admit
    admitted = config.allowed_peers
    admitted = None if admitted is None else (*admitted, address)
    own = replace(config, allowed_peers=admitted, curve_server_keys=None)
    yield from _wire_rows(own, device, None, {})


def _gpu_rows(config: Config, found: tuple[rows.GpuFacts, ...] | Failure) -> Iterator[Row]:
    if isinstance(found, Failure):
        yield rows.failure_row("gpu", State.FAIL, found)
        return
    yield from rows.gpu_rows(found)
    if not found:
        return
    with Child(config, gpus.lending) as lender:
        lent = lender.answer(_GPUS_S)
        tries = lent if isinstance(lent, Failure) else call(config, _GPUS_S, gpus.borrowing, lent)
    if isinstance(tries, Failure):
        yield rows.failure_row("cuda ipc", State.WARN, tries)
    else:
        yield from rows.ipc_rows(tries)


def _try_peer(config: Config, endpoint: str, device: torch.device) -> Iterator[Row]:
    problem = host.why_unreachable(*parse_endpoint(endpoint), config.connect_timeout_s)
    if problem:
        yield rows.failed_row("peer address", State.FAIL, f"{endpoint}: {problem}", "")
        return
    yield Row("peer address", State.OK, f"{endpoint}: a TCP connection begins")
    greeted = call(config, engines.contact_s(config), engines.greeting, config, endpoint)
    if isinstance(greeted, Failure):
        yield rows.failure_row("peer engine", State.FAIL, greeted)
        return
    manifest, curve = greeted.manifest, "on" if greeted.has_curve else "off"
    seen = f"{manifest.engine_id}, {len(manifest.ranks)} ranks, CURVE {curve}: says hello in"
    yield Row("peer engine", State.OK, f"{seen} {greeted.hello_s * 1e3:.0f} ms")
    yield _ports_row(config, manifest)
    why_not = {wire: why for wire in AUTO[device.type] if (why := _not_offered(manifest, wire))}
    yield from _wire_rows(config, device, (endpoint, len(manifest.ranks)), why_not)


def _wire_rows(
    config: Config, device: torch.device, peer: _Met, why_not: dict[str, str]
) -> Iterator[Row]:
    """Each alone, then what the settings take. ``why_not``: tried only where they are asked for."""
    chosen, tried = _meet(config, device, peer), set(AUTO[device.type])
    if not isinstance(chosen, Failure):
        tried = {name for each in chosen.values() for name in (each.transport, *each.reasons)}
    for wire in AUTO[device.type]:
        is_needed = config.transport == wire
        why = why_not.get(wire, "")
        if wire in OPTIONAL and find_spec(OPTIONAL[wire]) is None:
            why = "its library is not installed"
        if why and not is_needed:
            yield Row(f"wire {wire}", State.SKIPPED, why)
            continue
        yield rows.wire_row(
            f"wire {wire}",
            _meet(replace(config, transport=wire, min_gbps=None), device, peer),
            is_needed=is_needed,
            note="" if wire in tried or not tried else f"; {config.transport} does not try it here",
            min_gbps=config.min_gbps,
        )
    row = rows.wire_row("choice", chosen, is_needed=True)
    if isinstance(chosen, Failure) and chosen.reason is Reason.TRANSPORT:
        row = Row("choice", State.FAIL, chosen.detail, "see the rows of the wires")
    yield replace(row, seen=f"{config.transport}: {row.seen}")


def _meet(config: Config, device: torch.device, peer: _Met) -> Choices | Failure:
    """None: an engine of its own, so that a library that crashes takes no other wire with it."""
    if peer is not None:
        endpoint, num_ranks = peer
        timeout_s = (1 + num_ranks) * engines.contact_s(config)
        return call(config, timeout_s, engines.meeting, config, endpoint, device)
    with Child(config, engines.waiting, config, device) as child:
        listens_at = child.answer(WAIT_S)
        if isinstance(listens_at, Failure):
            return listens_at
        met = _meet(config, device, (listens_at, 1))
    return child.crash() or met


def _ports_row(config: Config, manifest: EngineManifest) -> Row:
    uses = {
        where: f"{use} of rank {entry.rank}"
        for entry in manifest.ranks
        for use, where in {"control": entry.control_endpoint, **entry.data_endpoints}.items()
    }
    for where, use in uses.items():
        problem = host.why_unreachable(*parse_endpoint(where), config.connect_timeout_s)
        if problem:
            return rows.failed_row("peer ports", State.FAIL, f"{where}, {use}: {problem}", "")
    return Row("peer ports", State.OK, f"all {len(uses)} of its ranks can be reached")


def _not_offered(manifest: EngineManifest, wire: str) -> str:
    """Why the peer cannot be read so, by what it says of itself; "" if it may."""
    for entry in manifest.ranks:
        if wire not in _HANDLES:
            if wire not in entry.data_endpoints:
                return "the peer does not offer it"
            continue
        for memory in entry.memories:
            if not isinstance(memory.handle, _HANDLES[wire]):
                return "the peer does not offer it"
            if memory.handle.boot_id != boot_id():
                return "the peer is on another host"
    return ""


def wait_for_peers(config: Config, tell: Callable[[str], object]) -> NoReturn:
    """Run an engine that doctors elsewhere can meet, in the memory that ``examine`` takes. ``tell``
    gets its endpoint. Raises ConfigError if it cannot listen, PeerLost if it ends by itself.
    """
    device = torch.device("cuda", 0) if torch.cuda.device_count() else HOST
    config = config.for_engine(gives_kv=True, num_ranks=1).for_rank(0)
    if config.log_level == "INFO":  # which says of each port that a doctor has tried that it was
        config = replace(config, log_level="WARNING")
    with Child(config, engines.waiting, config, device, is_loud=True) as child:
        endpoint = child.answer(WAIT_S)
        if isinstance(endpoint, Failure):
            raise ConfigError(endpoint.detail)
        tell(endpoint)
        child.answer(None)
    raise PeerLost(f"the waiting engine has ended: {child.crash() or 'see its log'}")
