"""What the commands do once their options are read. Imported by a command when it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import wait

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvxfer.cli.options import (
    DecodeOptions,
    PairOptions,
    PrefillOptions,
    RunOptions,
    parse_address,
    place_sides,
)
from kvxfer.cli.outcome import Result, summarise
from kvxfer.cli.replay import Replay, RunEngine
from kvxfer.cli.report import facts, make_console, show, write_json
from kvxfer.cli.sides import (
    SERVER_SEQS,
    Work,
    fitted,
    model_name,
    read_model,
    read_work,
    settings,
    single_engine,
    transfer_engine,
)
from kvxfer.config import Config
from kvxfer.engine.config import CPU, EngineConfig, Role, count_cuda_devices
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.kv_plan import longest_request
from kvxfer.engine.model_config import ModelConfig
from kvxfer.engine.rpc import Info, RpcClient
from kvxfer.errors import PeerLost

_INFO_S = 10.0
"""An engine answers between its steps; its longest step takes a few seconds at most."""
_SERVER_BLOCKS = 2048
"""Blocks of an engine that does not know its work: 32,768 tokens in blocks of 16."""

log = logging.getLogger("kvxfer.cli")


def run_pair(options: PairOptions) -> bool:
    """Both groups on this host, and the single engine beside them. Returns whether all is well."""
    prefill, decode = options.prefill, options.decode
    model = read_model(options, (prefill.tp_size, decode.tp_size, 1))
    work = read_work(options, model)
    prefill, decode = place_sides((prefill, decode), count_cuda_devices)
    configs = {}
    for role, side in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        # Free ports: the two front doors are on one host, and nobody else needs to find them.
        kv = settings(options, given={"port": 0}, defaults={"log_level": "WARNING"})
        engine = transfer_engine(role, side, options, model, kv)
        configs[role.value] = fitted(engine, side, options, model, work)
    set_ups = {"prefill": _faulty(options.prefill_faults), "decode": _faulty(options.decode_faults)}
    return _run(options, model, work, configs, set_ups=set_ups)


def _faulty(faults: str) -> Callable[[], None] | None:
    """What a rank's process does first. Raises ConfigError for faults that nobody knows."""
    if not faults:
        return None
    from kvxfer.testing.faults import install, parse_faults

    parse_faults(faults)
    return partial(install, faults)


def run_prefill(options: PrefillOptions) -> None:
    """Serve until a rank dies (KvxferError), or the process is told to end."""
    listen = parse_address("--listen", options.listen)
    side = options.side
    model = read_model(options, (side.tp_size,))
    (side,) = place_sides((side,), count_cuda_devices)
    num_blocks = side.num_blocks or _SERVER_BLOCKS
    host = {"host": listen.host.strip("[]")}
    kv = settings(options, given={"port": options.kv_port}, defaults=host)
    config = msgspec.structs.replace(
        transfer_engine(Role.PREFILL, side, options, model, kv),
        num_blocks=num_blocks,
        max_model_len=num_blocks * side.block_size,
        max_num_seqs=SERVER_SEQS,
        digests=options.digests,
    )
    config = msgspec.structs.replace(config, max_model_len=longest_request(config, model))
    console = make_console()
    with EngineGroup(config, host=listen.host, port=listen.port) as group:
        console.print(
            f"prefill: {group.endpoint} serves {model_name(options)} "
            f"(TP {side.tp_size}, block {side.block_size}, {side.layout}{_where(config)}), "
            f"KV at {group.kv_endpoint}; end with ctrl-C",
            soft_wrap=True,
        )
        while True:
            wait(list(group.sentinels))
            group.check()


def run_decode(options: DecodeOptions) -> bool:
    """The decode side, against a prefill engine elsewhere. Returns whether all is well."""
    prefill_at = parse_address("--prefill", options.prefill)
    side = options.side
    model = read_model(options, (side.tp_size, 1))
    work = read_work(options, model)
    (side,) = place_sides((side,), count_cuda_devices)
    kv = settings(options, given={"port": options.kv_port})
    engine = transfer_engine(Role.DECODE, side, options, model, kv)
    configs = {"decode": fitted(engine, side, options, model, work)}
    return _run(options, model, work, configs, f"tcp://{prefill_at}", options.wait_s)


def _run(
    options: RunOptions,
    model: ModelConfig,
    work: Work,
    configs: dict[str, EngineConfig],
    prefill_at: str | None = None,
    wait_s: float = 0.0,
    set_ups: Mapping[str, Callable[[], None] | None] | None = None,
) -> bool:
    """Start the engines of ``configs`` (and the single one), send them the work, show the results.
    ``prefill_at``: the prefill engine, where it is not among them; it may be away for ``wait_s``.
    ``set_ups``: what the ranks of an engine do first, by its name.
    """
    if options.verify:
        device = configs["decode"].rank_devices[0]
        configs["single"] = single_engine(options, model, work, device=device)
    console = make_console()
    engines: dict[str, RunEngine] = {}
    with ExitStack() as stack:
        groups = {
            name: stack.enter_context(EngineGroup(c, set_up=(set_ups or {}).get(name)))
            for name, c in configs.items()
        }
        if prefill_at is not None:
            remote = RunEngine(
                _client(stack, prefill_at, configs["decode"].kv, wait_s), come_back_s=wait_s
            )
            stack.callback(lambda: remote.client.close())  # it may be another one by then
            engines["prefill"] = remote
        sides = [
            f"{name} TP {c.tp_size} block {c.block_size} {c.layout}{_where(c)}"
            for name, c in configs.items()
        ]
        console.print(
            f"model {model_name(options)}, {len(work.prompts)} prompts; {'; '.join(sides)}",
            soft_wrap=True,
        )
        for name, group in groups.items():
            engines[name] = RunEngine(_client(stack, group.endpoint, configs[name].kv), group)
        started_s = time.monotonic()
        with _progress(console) as progress:
            results: list[Result] = Replay(
                work,
                prefill=engines["prefill"],
                decode=engines["decode"],
                single=engines.get("single"),
                on_load_failure=options.on_load_failure,
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
            infos = {name: info for name, engine in engines.items() if (info := _info(engine))}
            write_json(options.json, facts(results, summary, engines=configs, infos=infos))
        return summary.is_good


def _client(stack: ExitStack, endpoint: str, kv: Config, timeout_s: float = _INFO_S) -> RpcClient:
    return stack.enter_context(RpcClient(endpoint, connect_timeout_s=timeout_s, kv=kv))


def _where(config: EngineConfig) -> str:
    """The devices of the ranks, in order, unless they are where they always were."""
    return "" if config.device == CPU else f" on {', '.join(config.rank_devices)}"


def _info(engine: RunEngine) -> Info | None:
    """The engine as it stands after the run; None when it has gone meanwhile."""
    if engine.lost_at_s is not None:
        return None
    try:
        return engine.client.ask(_INFO_S)
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
