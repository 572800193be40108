"""Finding UCX and its binding ``ucxx``, and what UCX is told.

Neither is imported before somebody asks for the wire: kvxfer runs without them. ``libucx`` (the
wheel that carries UCX) has to be loaded before ``ucxx``, whose own loader skips it unless RMM is
installed, which this wire has no use for. Without that wheel the system's UCX is taken;
``RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true`` takes it in any case.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from kvxfer.config import variables_kept, variables_of
from kvxfer.errors import TransportUnavailable
from kvxfer.extras import install
from kvxfer.transports.pipe import PipeBroken

Foreign: TypeAlias = Any
"""An object of the bindings, which have no types."""
Request: TypeAlias = Any
Endpoint: TypeAlias = Any
Worker: TypeAlias = Any

UCXX_AT_LEAST = (0, 51)
"""Earlier ones are linked with RMM."""

_SEGMENT = "256k"
"""Of UCX over TCP, which copies into a buffer of this size, sends it, and copies out of one. Its
own 8 KiB cost twice the CPU time (49 ms for 64 MiB instead of 24); 1 MiB is no better."""
_RNDV_THRESH = "256000"
"""Less than a segment, so that no message comes in several without a handshake: where its sender is
killed half-way, UCX ends the receive of such a message never."""
_ADDRESS_VERSION, _KNOWN_VERSIONS = 0x0F, (0, 1)
"""In the first byte of a worker's address: UCX 1.21 asserts that it is one of these."""
_RNDV_THRESH_CUDA = "8192"
"""``auto`` and ``inf`` send memory of a GPU through the host: 0.5 GB/s instead of 300."""


class Ucx:
    """The calls of ``ucxx`` that kvxfer uses, typed."""

    def __init__(self) -> None:
        """Raises TransportUnavailable with what to install."""
        package, self._array = _import_ucxx()
        check_version(str(package.__version__))
        self._library: Any = package.libucxx
        self.Error: type[Exception] = self._library.UCXError

    def context(self, device: torch.device, net_devices: Sequence[str]) -> Foreign:
        """For staging on this device, on these of the network. Raises TransportUnavailable."""
        options = settings(device, net_devices, variables_of("UCX_"))
        try:
            context = self._context(options)
        except self.Error as exc:
            if "RCACHE_ENABLE" in options and self._starts(options | {"RCACHE_ENABLE": "n"}):
                raise TransportUnavailable(
                    "ucx: expected UCX's hooks of memory functions, got none; has another UCX, as "
                    "NIXL's, put its own in their place? Make kvxfer's wires after that, or name "
                    "another one with transport"
                ) from exc
            raise TransportUnavailable(f"ucx: expected a UCX that starts, got {exc!r}") from exc
        # One without CUDA, or without the driver, would take GPU memory for the host's.
        if device.type == "cuda" and "cuda_cpy" not in context.info:
            raise TransportUnavailable(
                "ucx: expected a UCX with CUDA, because the KV is in GPU memory, got one without; "
                "libucx-cu13 has it, and so has a system UCX that was built --with-cuda"
            )
        return context

    def _context(self, options: dict[str, str]) -> Foreign:
        feature = self._library.Feature
        # With all features an endpoint takes twice the time (20 ms of CPU) to choose protocols.
        return self._library.UCXContext(
            config_dict=options, feature_flags=(feature.TAG, feature.WAKEUP)
        )

    def _starts(self, options: dict[str, str]) -> bool:
        try:
            self._context(options)
        except self.Error:
            return False
        return True

    def worker(self, context: object) -> Worker:
        """One that can be waited for. Raises TransportUnavailable."""
        try:
            worker = self._library.UCXWorker(context)
            worker.init_blocking_progress_mode()
        except self.Error as exc:
            raise TransportUnavailable(f"ucx: expected a worker, got {exc!r}") from exc
        return worker

    def connect(self, worker: Worker, address: bytes) -> Endpoint:
        """To the worker with this address. Raises PipeBroken."""
        if not address or address[0] & _ADDRESS_VERSION not in _KNOWN_VERSIONS:
            raise PipeBroken(
                f"ucx: expected an address of the versions {_KNOWN_VERSIONS} of UCX, got "
                f"{address[:1].hex() or 'nothing'} as its first byte; use one UCX on both sides"
            )
        try:
            peer = self._library.UCXAddress.create_from_buffer(address)
            return self._library.UCXEndpoint.create_from_worker_address(
                worker, peer, endpoint_error_handling=True
            )
        except (self.Error, IndexError) as exc:
            raise PipeBroken(f"ucx: expected an address that can be reached, got {exc!r}") from exc

    def unasked(self, worker: Worker, *, take: bool) -> Foreign:
        """A message that no receive was posted for. ``take``: it has to be received now."""
        library = self._library
        return worker.tag_probe(library.UCXXTag(0), library.UCXXTagMask(0), remove=take)

    def array(self, part: torch.Tensor | bytearray) -> object:
        """Flat memory that an operation may be given."""
        if isinstance(part, torch.Tensor) and not part.is_cuda:
            return self._array(part.numpy())
        return self._array(part)

    def tag(self, number: int) -> Foreign:
        """A number of 64 bits as UCX's tag."""
        return self._library.UCXXTag(number)


def _import_ucxx() -> tuple[Any, Callable[[object], object]]:
    """The package, and what makes one of its arrays."""
    # What ucxx sets when it is imported, NIXL would find too. UCX reads this one when it is loaded:
    # the cache of memory types needs hooks, which miss memory that is freed.
    with variables_kept("UCX_", UCX_MEMTYPE_CACHE="n"):
        try:
            _load_wheel_of_ucx()
            # optional, and without types
            package = importlib.import_module("ucxx")
            array: Callable[[object], object] = importlib.import_module("ucxx._lib.arr").Array
        except (ImportError, OSError) as exc:
            raise TransportUnavailable(f"ucx: expected ucxx, got {exc}; {install('ucx')}") from exc
    return package, array


def check_version(version: str) -> None:
    """Raises TransportUnavailable for one of ``ucxx`` that this wire was not written for."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < UCXX_AT_LEAST:
        least = ".".join(map(str, UCXX_AT_LEAST))
        raise TransportUnavailable(
            f"ucx: expected ucxx {least} or newer, got {version}; {install('ucx')}"
        )


def settings(
    device: torch.device, net_devices: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Options of UCX, without their prefix; what the environment says of one stays."""
    chosen = {
        # With peer error handling UCX takes no shared memory by itself, yet each worker would map
        # 4 MiB. Where it is made to (POSIX_ERROR_HANDLING), 1.21 crashes at the end of connections.
        "TLS": "^sm,self",
        "TCP_TX_SEG_SIZE": _SEGMENT,
        "TCP_RX_SEG_SIZE": _SEGMENT,
        # Otherwise "connect" has the IO thread wait. And where it is refused at once, because the
        # peer has died after asking for the connection, 1.21 and 1.22 use what they have freed.
        "TCP_CONN_NB": "y",
        # Without this cache, for which it needs hooks of memory functions, UCX 1.21 uses a
        # null pointer when a peer dies while a chunk is under way (openucx/ucx #11467).
        "RCACHE_ENABLE": "y",
        "RNDV_THRESH": _RNDV_THRESH,
        "NET_DEVICES": ",".join(net_devices),
    }
    if device.type == "cuda":
        chosen |= {
            "RNDV_THRESH": _RNDV_THRESH_CUDA,
            "RNDV_FRAG_MEM_TYPE": "cuda",
            "MAX_RNDV_RAILS": "1",
        }
    return {name: value for name, value in chosen.items() if f"UCX_{name}" not in environ}


def _load_wheel_of_ucx() -> None:
    try:
        libucx = importlib.import_module("libucx")
    except ModuleNotFoundError:
        return  # then the loader finds the system's, or says that there is none
    libucx.load_library()
