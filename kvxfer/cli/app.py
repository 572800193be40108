"""The commands and their options. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from kvxfer.cli.options import (
    Dtype,
    Layout,
    ModelOptions,
    SideOptions,
    Wire,
    WorkOptions,
    parse_address,
    parse_devices,
)
from kvxfer.cli.version import own_version
from kvxfer.engine.config import OnLoadFailure
from kvxfer.engine.devices import CPU, check_device
from kvxfer.errors import KvxferError
from kvxfer.proxy.settings import (
    MAX_BODY_NBYTES,
    OnMissingKv,
    ProxySettings,
    Side,
    parse_engines,
)

DIFFERENT, WRONG = 1, 2
"""Exit codes: something was not equal or failed; the command could not do its work."""

app = typer.Typer(
    help="Move the KV cache of requests from prefill workers to decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str | None,
    typer.Option(
        help="Hugging Face folder, or a bare config.json (seeded random weights), or a built-in "
        "model: hybrid (sliding windows), kv-sharing; a tiny one if not given.",
        metavar="CONFIG_OR_DIR",
    ),
]
KvHeads = Annotated[
    int | None, typer.Option(min=1, help="KV heads, for models with random weights.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Of weights and KV; auto: the model's own.")]
WireOption = Annotated[
    Wire | None, typer.Option("--transport", help="The wire; auto if not given.")
]
LogLevel = Annotated[
    str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR or CRITICAL, on standard error.")
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, one process each.")]
BlockSize = Annotated[int, typer.Option(help="Tokens of a block, a multiple of 8.")]
LayoutOption = Annotated[Layout, typer.Option(help="Heads before tokens in a block, or after.")]
NumBlocks = Annotated[
    int | None, typer.Option(min=2, help="Blocks of each rank's pool; from the work if not given.")
]
PrefixCaching = Annotated[bool, typer.Option(help="Keep blocks for later requests to find.")]
Faults = Annotated[str, typer.Option(help="Inject faults into this side's wire.", metavar="SPEC")]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="Where ranks compute: cpu; cuda: a GPU for each rank as far as they go; cuda:N: all "
        "on that one.",
        metavar="cpu|cuda|cuda:N",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="With --device cuda: the GPU of each rank, as in 0,1; those that are free of other "
        "ranks first if not given.",
        metavar="N,N,...",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help='JSONL of {"prompt_token_ids": [...]} or {"prompt": "text"}, or plain text, one '
        "prompt a line. Built-in prompts if not given.",
        metavar="FILE",
    ),
]
Trace = Annotated[Path | None, typer.Option(help="Replay a request trace.", metavar="FILE")]
TraceScale = Annotated[int, typer.Option(help="Divide the trace's lengths by this.")]
TimeScale = Annotated[
    float, typer.Option(help="Seconds for one second of the trace; 0: as fast as possible.")
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many prompts.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to decode for each prompt, at most.")]
InFlight = Annotated[int, typer.Option(help="Requests that run at once.")]
Policy = Annotated[
    OnLoadFailure, typer.Option(help="What happens to a request whose KV cannot be loaded.")
]
AllowRecompute = Annotated[
    bool,
    typer.Option(
        "--allow-recompute",
        help="A request that computes what it could not load is as good as one that loads it.",
    ),
]
Json = Annotated[
    Path | None, typer.Option("--json", help="Write the facts to this file.", metavar="FILE")
]
KvPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the KV front door; 0: a free one. If not given, decode takes a free one.",
    ),
]


@app.command()
def pair(
    prefill_tp: Tp = 2,
    decode_tp: Tp = 1,
    prefill_block_size: BlockSize = 16,
    decode_block_size: BlockSize = 32,
    prefill_layout: LayoutOption = Layout.HND,
    decode_layout: LayoutOption = Layout.NHD,
    device: DeviceOption = CPU,
    prefill_devices: Devices = None,
    decode_devices: Devices = None,
    kv_heads: KvHeads = None,
    model: Model = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    transport: WireOption = None,
    prompts: Prompts = None,
    trace: Trace = None,
    trace_scale: TraceScale = 16,
    time_scale: TimeScale = 0.0,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 32,
    in_flight: InFlight = 8,
    on_load_failure: Policy = OnLoadFailure.RECOMPUTE,
    allow_recompute: AllowRecompute = False,
    verify: Annotated[
        bool, typer.Option(help="Compare tokens with a single engine's, and KV with the source's.")
    ] = True,
    json: Json = None,
    prefill_blocks: NumBlocks = None,
    decode_blocks: NumBlocks = None,
    prefill_prefix_caching: PrefixCaching = True,
    decode_prefix_caching: PrefixCaching = True,
    prefill_faults: Faults = "",
    decode_faults: Faults = "",
    log_level: LogLevel = None,
) -> None:
    """Prefill in one group of processes, move the KV, decode in another, and compare.

    Exit status: 0 when everything is equal, 1 when something differs or failed or KV was not used,
    2 for errors.
    """
    with _border():
        work = WorkOptions(
            *(prompts, trace, trace_scale, time_scale, limit),
            *(max_new_tokens, in_flight, verify, json, allow_recompute),
        )
        check_device("--device", device)
        prefill_numbers = parse_devices("--prefill-devices", prefill_devices)
        decode_numbers = parse_devices("--decode-devices", decode_devices)
        from kvxfer.cli.commands import run_pair

        is_good = run_pair(
            ModelOptions(model, kv_heads, dtype),
            SideOptions(
                *(prefill_tp, prefill_block_size, prefill_layout),
                *(prefill_blocks, prefill_prefix_caching),
                *(device, prefill_numbers),
            ),
            SideOptions(
                *(decode_tp, decode_block_size, decode_layout),
                *(decode_blocks, decode_prefix_caching),
                *(device, decode_numbers),
            ),
            work,
            wire=transport,
            on_load_failure=on_load_failure,
            log_level=log_level,
            faults={"prefill": prefill_faults, "decode": decode_faults},
        )
        _end(is_good)


@app.command()
def prefill(
    listen: Annotated[
        str, typer.Option(help="Where requests are taken; port 0: a free one.", metavar="HOST:PORT")
    ],
    tp: Tp = 2,
    block_size: BlockSize = 16,
    layout: LayoutOption = Layout.HND,
    device: DeviceOption = CPU,
    devices: Devices = None,
    kv_heads: KvHeads = None,
    model: Model = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    transport: WireOption = None,
    kv_port: KvPort = None,
    num_blocks: NumBlocks = None,
    prefix_caching: PrefixCaching = True,
    digests: Annotated[
        bool, typer.Option(help="Digest every request's KV, so that decode --verify can compare.")
    ] = False,
    log_level: LogLevel = None,
) -> None:
    """Serve prefill requests, and give their KV to decode engines, until ctrl-C."""
    with _border():
        address = parse_address("--listen", listen)
        check_device("--device", device)
        numbers = parse_devices("--devices", devices)
        from kvxfer.cli.commands import run_prefill

        run_prefill(
            address,
            ModelOptions(model, kv_heads, dtype),
            SideOptions(
                *(tp, block_size, layout, num_blocks, prefix_caching),
                *(device, numbers),
            ),
            wire=transport,
            kv_port=kv_port,
            digests=digests,
            log_level=log_level,
        )


@app.command()
def decode(
    prefill_at: Annotated[
        str,
        typer.Option("--prefill", help="Where kvxfer prefill listens.", metavar="HOST:PORT"),
    ],
    tp: Tp = 1,
    block_size: BlockSize = 32,
    layout: LayoutOption = Layout.NHD,
    device: DeviceOption = CPU,
    devices: Devices = None,
    kv_heads: KvHeads = None,
    model: Model = None,
    dtype: DtypeOption = Dtype.FLOAT32,
    transport: WireOption = None,
    kv_port: KvPort = None,
    prompts: Prompts = None,
    trace: Trace = None,
    trace_scale: TraceScale = 16,
    time_scale: TimeScale = 0.0,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 32,
    in_flight: InFlight = 8,
    on_load_failure: Policy = OnLoadFailure.RECOMPUTE,
    allow_recompute: AllowRecompute = False,
    verify: Annotated[
        bool,
        typer.Option(
            help="Compare tokens with a single engine's, and KV where the source has --digests."
        ),
    ] = False,
    json: Json = None,
    num_blocks: NumBlocks = None,
    prefix_caching: PrefixCaching = True,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0.1, help="Seconds to wait for prefill to be there, or back."),
    ] = 30.0,
    log_level: LogLevel = None,
) -> None:
    """Send prompts to a prefill engine elsewhere, take their KV, and decode here.

    Exit status: 0 when every request ended well with the KV that it asked for and nothing differs,
    1 when not, 2 for errors.
    """
    with _border():
        address = parse_address("--prefill", prefill_at)
        work = WorkOptions(
            *(prompts, trace, trace_scale, time_scale, limit),
            *(max_new_tokens, in_flight, verify, json, allow_recompute),
        )
        check_device("--device", device)
        numbers = parse_devices("--devices", devices)
        from kvxfer.cli.commands import run_decode

        is_good = run_decode(
            address,
            ModelOptions(model, kv_heads, dtype),
            SideOptions(
                *(tp, block_size, layout, num_blocks, prefix_caching),
                *(device, numbers),
            ),
            work,
            wire=transport,
            kv_port=kv_port,
            on_load_failure=on_load_failure,
            wait_s=wait_s,
            log_level=log_level,
        )
        _end(is_good)


@app.command()
def proxy(
    prefill_at: Annotated[
        list[str],
        typer.Option(
            "--prefill",
            help="A prefill engine; several: several times.",
            metavar="http://HOST:PORT",
        ),
    ],
    decode_at: Annotated[
        list[str],
        typer.Option(
            "--decode", help="A decode engine; several: several times.", metavar="http://HOST:PORT"
        ),
    ],
    listen: Annotated[
        str, typer.Option(help="Where clients connect; port 0: a free one.", metavar="HOST:PORT")
    ] = "127.0.0.1:8000",
    on_missing_kv: Annotated[
        OnMissingKv,
        typer.Option(
            help="What happens to a request whose prefill failed: answered with an error, or sent "
            "to decode without KV and counted. One whose prefill offers no KV goes there always."
        ),
    ] = OnMissingKv.REFUSE,
    timeout_s: Annotated[float, typer.Option(help="Seconds for a whole prefill.")] = 300.0,
    connect_timeout_s: Annotated[
        float, typer.Option(help="Seconds to connect to an engine.")
    ] = 5.0,
    health_interval_s: Annotated[
        float, typer.Option(help="Seconds between two health probes of an engine.")
    ] = 2.0,
    max_body_nbytes: Annotated[
        int, typer.Option(help="Bytes of a request's body, at most.")
    ] = MAX_BODY_NBYTES,
    log_level: Annotated[
        str, typer.Option(help="DEBUG, INFO, WARNING, ERROR or CRITICAL, on standard error.")
    ] = "INFO",
) -> None:
    """Serve OpenAI requests with prefill and decode engines of vLLM, until ctrl-C.

    Each request is prefilled by one engine and decoded by another, in turn. Needs the extra proxy.
    """
    with _border():
        address = parse_address("--listen", listen, everywhere=True)
        settings = ProxySettings(
            prefill=parse_engines(Side.PREFILL, prefill_at),
            decode=parse_engines(Side.DECODE, decode_at),
            host=address.host.strip("[]"),
            port=address.port,
            on_missing_kv=on_missing_kv,
            prefill_timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            health_interval_s=health_interval_s,
            max_body_nbytes=max_body_nbytes,
        )
        from kvxfer.cli.proxy import run_proxy

        raise _ToldToEnd(run_proxy(settings, log_level))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvxfer {own_version()}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")
    ] = False,
) -> None:
    """Move the KV cache of requests from prefill workers to decode workers."""


def main() -> None:
    """The command ``kvxfer``."""
    app(prog_name="kvxfer")


class _ToldToEnd(BaseException):
    """SIGINT or SIGTERM came. Not an Exception: nobody on the way handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _border() -> Iterator[None]:
    """Errors become one line and an exit code; signals end what was started, and then this."""
    logging.basicConfig(level=logging.WARNING, format="kvxfer: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _tell_to_end)
    try:
        yield
    except KvxferError as e:
        print(f"kvxfer: error: {e}", file=sys.stderr)
        raise typer.Exit(WRONG) from e
    except _ToldToEnd as e:
        print(f"kvxfer: ended by {signal.Signals(e.number).name}", file=sys.stderr)
        raise typer.Exit(128 + e.number) from e


def _tell_to_end(number: int, _frame: FrameType | None) -> NoReturn:
    # Once is enough: a second one must not cut the ending short.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise _ToldToEnd(number)


def _end(is_good: bool) -> None:
    if not is_good:
        raise typer.Exit(DIFFERENT)
