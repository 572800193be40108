"""What the commands do once their options are read. Imported by a command when it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvxfer.cli.options import (
    Address,
    ModelOptions,
    SideOptions,
    Wire,
    WorkOptions,
    place_sides,
)
from kvxfer.cli.outcome import Result, summarise
from kvxfer.cli.replay import Link, Replay
from kvxfer.cli.report import facts, make_console, show, write_json
from kvxfer.cli.sides import (
    Work,
    model_name,
    pool_blocks,
    read_model,
    read_work,
    settings,
    single_engine,
    transfer_engine,
)
from kvxfer.config import Config
from kvxfer.engine.config import EngineConfig, OnLoadFailure, Role
from kvxfer.engine.devices import CPU, count_cuda_devices
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.kv_plan import longest_request
from kvxfer.engine.model_config import ModelConfig
from kvxfer.engine.rpc import Info, RpcClient
from kvxfer.errors import PeerLost

INFO_S = 10.0
"""An engine answers between its steps; its longest step takes a few seconds at most."""
SERVER_BLOCKS = 2048
"""Blocks of an engine that does not know its work: 32,768 tokens in blocks of 16."""
SERVER_SEQS = 64

log = logging.getLogger("kvxfer.cli")


@dataclass(frozen=True, slots=True)
class _Run:
    """The engines of a run as the results are asked for."""

    links: dict[str, Link]
    configs: dict[str, EngineConfig]


def run_pair(
    model_options: ModelOptions,
    prefill: SideOptions,
    decode: SideOptions,
    work_options: WorkOptions,
    *,
    wire: Wire | None,
    on_load_failure: OnLoadFailure,
    log_level: str | None,
    faults: Mapping[str, str],
) -> bool:
    """Both groups on this host, and the single engine beside them. Returns whether all is well.

    ``faults``: what the wires of a side do wrong, see ``kvxfer.testing.faults``.
    """
    model = read_model(model_options, (prefill.tp_size, decode.tp_size, 1))
    work = read_work(work_options, model, model_options.model)
    prefill, decode = place_sides((prefill, decode), count_cuda_devices)
    configs = {
        role.value: transfer_engine(
            role,
            side,
            model_options,
            model,
            # Free ports: the two front doors are on one host, and nobody else needs to find them.
            kv=_settings({"port": 0}, wire, log_level, quiet=True),
            num_blocks=pool_blocks(side, model, work),
            max_model_len=work.max_tokens(),
            max_num_seqs=max(SERVER_SEQS, work.in_flight),
            digests=work_options.verify,
            on_load_failure=on_load_failure,
        )
        for role, side in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    }
    if work_options.verify:
        device = configs["decode"].rank_devices[0]
        configs["single"] = single_engine(model_options, model, work, device=device)
    console = make_console()
    with ExitStack() as stack:
        groups = {
            name: stack.enter_context(EngineGroup(config, set_up=_faulty(faults.get(name, ""))))
            for name, config in configs.items()
        }
        _say_start(console, model_options, work, configs)
        links = {
            name: Link(_client(stack, group.endpoint), group) for name, group in groups.items()
        }
        return _replay(console, work, work_options, _Run(links, configs), model, on_load_failure)


def _faulty(faults: str) -> Callable[[], None] | None:
    """What a rank's process does first. Raises ConfigError for faults that nobody knows."""
    if not faults:
        return None
    from kvxfer.testing.faults import install, parse_faults

    parse_faults(faults)
    return partial(install, faults)


def run_prefill(
    listen: Address,
    model_options: ModelOptions,
    side: SideOptions,
    *,
    wire: Wire | None,
    kv_port: int | None,
    digests: bool,
    log_level: str | None,
) -> None:
    """Serve until a rank dies (KvxferError), or the process is told to end."""
    model = read_model(model_options, (side.tp_size,))
    (side,) = place_sides((side,), count_cuda_devices)
    num_blocks = side.num_blocks or SERVER_BLOCKS
    given: dict[str, Any] = {} if kv_port is None else {"port": kv_port}
    kv = _settings(given, wire, log_level, {"host": listen.host.strip("[]")})
    config = transfer_engine(
        Role.PREFILL,
        side,
        model_options,
        model,
        kv=kv,
        num_blocks=num_blocks,
        max_model_len=num_blocks * side.block_size,
        max_num_seqs=SERVER_SEQS,
        digests=digests,
    )
    config = msgspec.structs.replace(config, max_model_len=longest_request(config, model))
    console = make_console()
    with EngineGroup(config, host=listen.host, port=listen.port) as group:
        console.print(
            f"prefill: {group.endpoint} serves {model_name(model_options)} "
            f"(TP {side.tp_size}, block {side.block_size}, {side.layout}{_where(config)}), "
            f"KV at {group.kv_endpoint}; end with ctrl-C",
            soft_wrap=True,
        )
        while True:
            wait(list(group.sentinels))
            group.check()


def run_decode(
    prefill_at: Address,
    model_options: ModelOptions,
    side: SideOptions,
    work_options: WorkOptions,
    *,
    wire: Wire | None,
    kv_port: int | None,
    on_load_failure: OnLoadFailure,
    wait_s: float,
    log_level: str | None,
) -> bool:
    """The decode side, against a prefill engine elsewhere. Returns whether all is well."""
    model = read_model(model_options, (side.tp_size, 1))
    work = read_work(work_options, model, model_options.model)
    (side,) = place_sides((side,), count_cuda_devices)
    kv = _settings({"port": kv_port}, wire, log_level)
    configs = {
        "decode": transfer_engine(
            Role.DECODE,
            side,
            model_options,
            model,
            kv=kv,
            num_blocks=pool_blocks(side, model, work),
            max_model_len=work.max_tokens(),
            max_num_seqs=max(SERVER_SEQS, work.in_flight),
            digests=work_options.verify,
            on_load_failure=on_load_failure,
        )
    }
    if work_options.verify:
        device = configs["decode"].rank_devices[0]
        configs["single"] = single_engine(model_options, model, work, device=device)
    console = make_console()
    with ExitStack() as stack:
        groups = {name: stack.enter_context(EngineGroup(c)) for name, c in configs.items()}
        remote = Link(_client(stack, f"tcp://{prefill_at}", wait_s), come_back_s=wait_s)
        stack.callback(lambda: remote.client.close())  # it may be another one by then
        _say_start(console, model_options, work, configs)
        links = {
            name: Link(_client(stack, group.endpoint), group) for name, group in groups.items()
        }
        run = _Run({"prefill": remote, **links}, configs)
        return _replay(console, work, work_options, run, model, on_load_failure)


def _settings(
    given: dict[str, Any],
    wire: Wire | None,
    log_level: str | None,
    defaults: dict[str, Any] | None = None,
    *,
    quiet: bool = False,
) -> Config:
    options = {
        "transport": wire.value if wire else None,
        "log_level": log_level,
    }
    usual = {"log_level": "WARNING"} if quiet else {}
    return settings(defaults={**usual, **(defaults or {})}, given={**given, **options})


def _client(stack: ExitStack, endpoint: str, timeout_s: float = INFO_S) -> RpcClient:
    return stack.enter_context(RpcClient(endpoint, connect_timeout_s=timeout_s))


def _say_start(
    console: Console, options: ModelOptions, work: Work, configs: dict[str, EngineConfig]
) -> None:
    sides = [
        f"{name} TP {c.tp_size} block {c.block_size} {c.layout}{_where(c)}"
        for name, c in configs.items()
    ]
    console.print(
        f"model {model_name(options)}, {len(work.prompts)} prompts; {'; '.join(sides)}",
        soft_wrap=True,
    )


def _where(config: EngineConfig) -> str:
    """The devices of the ranks, in order, unless they are where they always were."""
    return "" if config.device == CPU else f" on {', '.join(config.rank_devices)}"


def _replay(
    console: Console,
    work: Work,
    options: WorkOptions,
    run: _Run,
    model: ModelConfig,
    on_load_failure: OnLoadFailure,
) -> bool:
    started_s = time.monotonic()
    with _progress(console) as progress:
        results: list[Result] = Replay(
            work,
            prefill=run.links["prefill"],
            decode=run.links["decode"],
            single=run.links.get("single"),
            on_load_failure=on_load_failure,
            progress=progress,
        ).run()
    summary = summarise(
        results,
        tokens_decide=model.dtype == "float32",
        wall_s=time.monotonic() - started_s,
        may_recompute=options.allow_recompute,
    )
    show(console, results, summary)
    if options.json is not None:
        infos = {name: info for name, link in run.links.items() if (info := _info(link))}
        write_json(options.json, facts(results, summary, engines=run.configs, infos=infos))
    return summary.is_good


def _info(link: Link) -> Info | None:
    """The engine as it stands after the run; None when it has gone meanwhile."""
    if link.lost_at_s is not None:
        return None
    try:
        return link.client.ask(INFO_S)
    except PeerLost as e:
        log.warning("%s", e)
        return None


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
