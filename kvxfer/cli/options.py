"""The options of each command as one frozen record. Free of torch and sockets."""

from __future__ import annotations

import enum
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from typer import Argument, Option

from kvxfer.config import ENV_PREFIX, OWN_TRANSPORTS
from kvxfer.engine.config import CPU, CUDA, OnLoadFailure, check_device, place_ranks
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.proxy.settings import MAX_BODY_NBYTES, Dispatch, OnMissingKv


def own_version() -> str:
    """As the package says itself. It stands above this room, and was loaded before it."""
    return str(vars(sys.modules["kvxfer"])["__version__"])


class Layout(enum.StrEnum):
    """Order of heads and tokens in a block."""

    HND = "HND"
    NHD = "NHD"


class Dtype(enum.StrEnum):
    """The element type of weights and KV; ``auto`` is the model file's own."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    AUTO = "auto"


# ------------------------------------------------------------------ options of several commands

_Tp = Annotated[int, Option(min=1, help="Tensor-parallel ranks, one process each.")]
_BlockSize = Annotated[int, Option(help="Tokens of a block, a multiple of 8.")]
_Layout = Annotated[Layout, Option(help="Heads before tokens in a block, or after.")]
_NumBlocks = Annotated[
    int | None, Option(min=2, help="Blocks of each rank's pool; from the work if not given.")
]
_PrefixCaching = Annotated[bool, Option(help="Keep blocks for later requests to find.")]
_Faults = Annotated[str, Option(help="Inject faults into this side's wire.", metavar="SPEC")]
_Devices = Annotated[
    str | None,
    Option(
        help="With --device cuda: the GPU of each rank, as in 0,1; those that are free of other "
        "ranks first if not given.",
        metavar="N,N,...",
    ),
]
_Dispatch = Annotated[
    Dispatch,
    Option(
        help="When decode hears of a request: after prefill's answer, or together with prefill, "
        "so that KV moves while prefill computes."
    ),
]
_PORTS = "N, N-M or N+rank"
_KvPort = Annotated[
    str | None,
    Option(
        help="Port of the KV front door, a range for all ranks, or one for each rank; 0: a free "
        "one. If not given, decode takes a free one, prefill 5700.",
        metavar=_PORTS,
    ),
]
_KvDataPort = Annotated[
    str | None,
    Option(help="Where stream wires listen; a free port if not given.", metavar=_PORTS),
]


@dataclass(frozen=True, slots=True)
class SideOptions:
    """One engine. ``num_blocks`` None: sized from the workload; ``devices``: the numbers of its
    ranks' CUDA devices, empty: placed by :func:`place_sides`; ``of``: the engine that its options
    name, where there are two.
    """

    tp_size: int
    block_size: int
    layout: Layout
    num_blocks: int | None
    prefix_caching: bool
    device: str = CPU
    devices: tuple[int, ...] = ()
    of: str = ""

    @property
    def option_names(self) -> dict[str, str]:
        """By fields of the engine's settings; ``pool``: those that decide its size."""
        prefix = f"--{self.of}-" if self.of else "--"
        num_blocks = f"{prefix}blocks" if self.of else "--num-blocks"
        work = "--max-new-tokens, --in-flight"
        return {
            "tp_size": f"{prefix}tp",
            "block_size": f"{prefix}block-size",
            "num_blocks": num_blocks,
            "devices": f"{prefix}devices",
            "faults": f"{prefix}faults",
            "pool": f"{prefix}block-size, {work if self.num_blocks is None else num_blocks}",
        }


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What all engines of a command have in common. Raises ConfigError, as all of these records."""

    device: Annotated[
        str,
        Option(
            help="Where ranks compute: cpu; cuda: a GPU for each rank as far as they go; cuda:N: "
            "all on that one.",
            metavar="cpu|cuda|cuda:N",
        ),
    ] = CPU
    kv_heads: Annotated[
        int | None, Option(min=1, help="KV heads, for models with random weights.")
    ] = None
    model: Annotated[
        str | None,
        Option(
            help="Hugging Face folder, or a bare config.json (seeded random weights), or a "
            "built-in model (hybrid, kv-sharing, chunked, states); a tiny one if not given.",
            metavar="CONFIG_OR_DIR",
        ),
    ] = None
    dtype: Annotated[Dtype, Option(help="Of weights and KV; auto: the model's own.")] = (
        Dtype.FLOAT32
    )
    transport: Annotated[
        str | None,
        Option(
            help="The wire, kvxfer's own or another package's; auto if not given.",
            metavar="|".join(OWN_TRANSPORTS),
        ),
    ] = None
    step_tokens: Annotated[
        int,
        Option(min=1, help="Tokens of a step, at most; longer prompts are computed in chunks."),
    ] = 2048
    log_level: Annotated[
        str | None, Option(help="DEBUG, INFO, WARNING, ERROR or CRITICAL, on standard error.")
    ] = None

    def __post_init__(self) -> None:
        check_device("--device", self.device)


@dataclass(frozen=True, kw_only=True)
class RunOptions(EngineOptions):
    """What is sent, and what is done with the answers."""

    prompts: Annotated[
        Path | None,
        Option(
            help='JSONL of {"prompt_token_ids": [...]} or {"prompt": "text"}, or plain text, one '
            "prompt a line. Built-in prompts if not given.",
            metavar="FILE",
        ),
    ] = None
    trace: Annotated[Path | None, Option(help="Replay a request trace.", metavar="FILE")] = None
    trace_scale: Annotated[int, Option(help="Divide the trace's lengths by this.")] = 16
    time_scale: Annotated[
        float, Option(help="Seconds for one second of the trace; 0: as fast as possible.")
    ] = 0.0
    limit: Annotated[int | None, Option(help="Only the first so many prompts.")] = None
    max_new_tokens: Annotated[int, Option(help="Tokens to decode for each prompt, at most.")] = 32
    in_flight: Annotated[int, Option(help="Requests that run at once.")] = 8
    dispatch: _Dispatch = Dispatch.IN_TURN
    on_load_failure: Annotated[
        OnLoadFailure, Option(help="What happens to a request whose KV cannot be loaded.")
    ] = OnLoadFailure.RECOMPUTE
    allow_recompute: Annotated[
        bool,
        Option(
            "--allow-recompute",
            help="A request that computes what it could not load is as good as one that loads it.",
        ),
    ] = False
    verify: bool = False
    json: Annotated[Path | None, Option(help="Write the facts to this file.", metavar="FILE")] = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is not None and self.trace is not None:
            raise ConfigError("--prompts: expected one source of prompts, got --trace as well")
        for option, value in (
            ("--limit", self.limit),
            ("--max-new-tokens", self.max_new_tokens),
            ("--in-flight", self.in_flight),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{option}: expected at least 1, got {value}")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ConfigError(f"--json: {self.json.parent} is no folder; make it first")
        if self.json is not None and self.json.is_dir():
            raise ConfigError(
                f"--json: expected a file, got the folder {self.json}; name one in it"
            )


# ------------------------------------------------------------------ one record for each command


_OF_A_SIDE = ("tp", "block_size", "layout", "blocks", "prefix_caching", "devices")


@dataclass(frozen=True, kw_only=True)
class PairOptions(RunOptions):
    """Of ``kvxfer pair``: two engines, each with options of its own."""

    prefill_tp: _Tp = 2
    decode_tp: _Tp = 1
    prefill_block_size: _BlockSize = 16
    decode_block_size: _BlockSize = 32
    prefill_layout: _Layout = Layout.HND
    decode_layout: _Layout = Layout.NHD
    prefill_devices: _Devices = None
    decode_devices: _Devices = None
    prefill_blocks: _NumBlocks = None
    decode_blocks: _NumBlocks = None
    prefill_prefix_caching: _PrefixCaching = True
    decode_prefix_caching: _PrefixCaching = True
    prefill_faults: _Faults = ""
    decode_faults: _Faults = ""
    verify: Annotated[
        bool, Option(help="Compare tokens with a single engine's, and KV with the source's.")
    ] = True

    def side(self, of: str) -> SideOptions:
        """``of``: prefill or decode."""
        own = {name: getattr(self, f"{of}_{name}") for name in _OF_A_SIDE}
        return SideOptions(
            *(own["tp"], own["block_size"], own["layout"], own["blocks"]),
            *(own["prefix_caching"], self.device),
            *(parse_devices(f"--{of}-devices", own["devices"]), of),
        )


@dataclass(frozen=True, kw_only=True)
class _OneEngine(EngineOptions):
    """Of a command with one engine that transfers KV."""

    tp: _Tp
    block_size: _BlockSize
    layout: _Layout
    devices: _Devices = None
    num_blocks: _NumBlocks = None
    prefix_caching: _PrefixCaching = True
    kv_port: _KvPort = None
    kv_data_port: _KvDataPort = None
    metrics: Annotated[
        str | None,
        Option(
            help="Serve /metrics there, for Prometheus; port 0: a free one.", metavar="HOST:PORT"
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metrics is not None:
            parse_address("--metrics", self.metrics, everywhere=True)

    @property
    def side(self) -> SideOptions:
        return SideOptions(
            *(self.tp, self.block_size, self.layout, self.num_blocks),
            *(self.prefix_caching, self.device),
            parse_devices("--devices", self.devices),
        )


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(_OneEngine):
    listen: Annotated[
        str, Option(help="Where requests are taken; port 0: a free one.", metavar="HOST:PORT")
    ]
    tp: _Tp = 2
    block_size: _BlockSize = 16
    layout: _Layout = Layout.HND
    digests: Annotated[
        bool, Option(help="Digest every request's KV, so that decode --verify can compare.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(RunOptions, _OneEngine):
    prefill: Annotated[str, Option(help="Where kvxfer prefill listens.", metavar="HOST:PORT")]
    tp: _Tp = 1
    block_size: _BlockSize = 32
    layout: _Layout = Layout.NHD
    verify: Annotated[
        bool,
        Option(
            help="Compare tokens with a single engine's, and KV where the source has --digests."
        ),
    ] = False
    wait_s: Annotated[
        float,
        Option("--wait", min=0.1, help="Seconds to wait for prefill to be there, or back."),
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    peer: Annotated[
        str | None,
        Option(
            help="KV address of an engine, or of a doctor that waits; if not given, wires are "
            "tried between two processes of this host.",
            metavar="HOST:PORT",
        ),
    ] = None
    listen: Annotated[
        bool, Option("--listen", help="Wait where an engine would, for a doctor elsewhere.")
    ] = False
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False
    min_gbps: Annotated[
        float | None, Option(help="The GB/s that a wire must make.", metavar="X")
    ] = None

    def __post_init__(self) -> None:
        if self.listen and (self.peer is not None or self.json):
            raise ConfigError("--listen: expected neither --peer nor --json beside it")


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    endpoint: Annotated[
        str | None,
        Argument(
            help="KV address of the engine; if not given, where one with these KVXFER_ settings "
            "listens, port 5700 unless they say another: name it on a host with several engines.",
            metavar="[HOST:PORT]",
        ),
    ] = None
    wait: Annotated[
        bool, Option("--wait", help="Wait until nothing is open: then the engine may be ended.")
    ] = False
    timeout_s: Annotated[
        float | None,
        Option(min=0.1, help="Seconds to wait at most; the setting drain_timeout_s if not given."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    prefill: Annotated[
        list[str],
        Option(help="A prefill engine; several: several times.", metavar="http://HOST:PORT"),
    ]
    decode: Annotated[
        list[str],
        Option(help="A decode engine; several: several times.", metavar="http://HOST:PORT"),
    ]
    listen: Annotated[
        str, Option(help="Where clients connect; port 0: a free one.", metavar="HOST:PORT")
    ] = "127.0.0.1:8000"
    on_missing_kv: Annotated[
        OnMissingKv,
        Option(
            help="What happens to a request whose prefill failed: answered with an error, or sent "
            "to decode without KV and counted. One whose prefill offers no KV goes there always."
        ),
    ] = OnMissingKv.REFUSE
    dispatch: _Dispatch = Dispatch.IN_TURN
    timeout_s: Annotated[float, Option(help="Seconds for a whole prefill.")] = 300.0
    connect_timeout_s: Annotated[float, Option(help="Seconds to connect to an engine.")] = 5.0
    health_interval_s: Annotated[
        float, Option(help="Seconds between two health probes of an engine.")
    ] = 0.5
    max_body_nbytes: Annotated[int, Option(help="Bytes of a request's body, at most.")] = (
        MAX_BODY_NBYTES
    )
    log_level: Annotated[
        str, Option(help="DEBUG, INFO, WARNING, ERROR or CRITICAL, on standard error.")
    ] = "INFO"


# ------------------------------------------------------------------ what options say


_SHARED_NAMES = {
    "transport": "--transport",
    "log_level": "--log-level",
    "port": "--kv-port",
    "metrics": "--metrics",
    "data_port": "--kv-data-port",
    "num_kv_heads": "--kv-heads",
    "dtype": "--dtype",
    "device": "--device",
    "listen": "--listen",
    **{wire: f"--transport {wire}" for wire in OWN_TRANSPORTS},
}
"""Options of all engines by the fields that they set."""
_FIELD_FIRST = re.compile(r"(engine \S+: )?(\w+)(: .*?)( \((argument|environment)\))?", re.DOTALL)


@contextmanager
def naming_options(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Errors name what a person has set: the option, or the variable, in the place of the field.
    ``names``: the options by field, beside those of all engines.
    """
    try:
        yield
    except KvxferError as e:
        found = _FIELD_FIRST.fullmatch(str(e))
        if found is None:
            raise
        engine, field, text, _, origin = found.groups(default="")
        name = (_SHARED_NAMES | dict(names or {})).get(field)
        if origin == "environment":
            name = ENV_PREFIX + field.upper()
        if name is None:
            raise
        raise type(e)(f"{engine}{name}{text}") from e


def parse_devices(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers of CUDA devices, "0,1"; none where the option was not given. Raises ConfigError."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise ConfigError(f"{option}: expected numbers of CUDA devices, as in 0,1, got {text!r}")
    return tuple(map(int, parts))


def place_sides(
    sides: Sequence[SideOptions], count_devices: Callable[[], int]
) -> tuple[SideOptions, ...]:
    """The engines of a command, each with a device for every rank.

    Who was given devices keeps them. The others take, in order, those that are left, and share
    where none is: with two GPUs and one rank a side, one each; with one GPU all are on that.
    ``count_devices`` is called only where that decides. Raises ConfigError where there are none.
    """
    taken = {number for side in sides for number in side.devices}
    placed = []
    for side in sides:
        if side.device == CUDA and not side.devices:
            with naming_options():
                devices = place_ranks(side.tp_size, count_devices(), taken)
            side = replace(side, devices=devices)
            taken.update(devices)
        placed.append(side)
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class HostPort:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def address_towards(peer: HostPort) -> str:
    """This host's, as the peer sees it; loopback where no way leads there. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            peer.host.strip("[]"), peer.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as asked:
            asked.connect(address)
            return str(asked.getsockname()[0])
    except OSError:
        return "127.0.0.1"


_EVERYWHERE = {"*", "0.0.0.0", "[::]", "::"}  # noqa: S104 - refused, not bound


def parse_address(option: str, text: str, *, everywhere: bool = False) -> HostPort:
    """The address of an option. Raises ConfigError, also for one that nobody can connect to.

    ``everywhere`` allows those, for a server that only listens and tells nobody where.
    """
    try:
        url = urlsplit(f"tcp://{text}")
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not host or port is None or url.path or url.username:
        raise ConfigError(f"{option}: expected HOST:PORT, got {text!r}")
    if host in _EVERYWHERE and not everywhere:
        raise ConfigError(
            f"{option}: expected an address of this host that the other side can connect to, "
            f"got {host}"
        )
    return HostPort(f"[{host}]" if ":" in host else host, port)
