"""What the commands do once their options are read. Imported by a command when it runs."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait

import msgspec
from rich.console import Console

from kvxfer.cli.memory import Need, check_memory, needs_of
from kvxfer.cli.options import (
    DecodeOptions,
    PairOptions,
    PrefillOptions,
    RunOptions,
    address_towards,
    naming_options,
    parse_address,
    place_sides,
)
from kvxfer.cli.outcome import summarise
from kvxfer.cli.prompts import text_decoder
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
from kvxfer.cli.terminal import ToldToEnd, heed_signals, progress_bar, stderr_above
from kvxfer.doctor.host import free_host_nbytes
from kvxfer.engine.config import CPU, EngineConfig, Role, count_cuda_devices
from kvxfer.engine.group import EngineGroup
from kvxfer.engine.kv_plan import longest_request
from kvxfer.engine.model_config import ModelConfig
from kvxfer.engine.rpc import Info, RpcClient
from kvxfer.errors import KvxferError, PeerLost

_INFO_S = 10.0
"""An engine answers between its steps; its longest step takes a few seconds at most."""
_SERVER_BLOCKS = 2048
"""Blocks of an engine that does not know its work: 32,768 tokens in blocks of 16."""
_ONE_ORDER_S = 0.2
"""A SIGTERM that follows another so soon is the same order: timeout(1) signals its command, and
then the whole group with the command in it."""

log = logging.getLogger("kvxfer.cli")


def run_pair(options: PairOptions) -> bool:
    """Both groups on this host, and the single engine beside them. Returns whether all is well."""
    prefill, decode = options.side("prefill"), options.side("decode")
    model = read_model(options, (prefill, decode))
    work = read_work(options, model)
    prefill, decode = place_sides((prefill, decode), count_cuda_devices)
    configs = {}
    for role, side in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        # Free ports: the two front doors are on one host, and nobody else needs to find them.
        given = {"port": 0, "data_port": 0}
        kv = settings(options, given=given, defaults={"log_level": "WARNING"})
        engine = transfer_engine(role, side, options, model, kv)
        configs[role.value] = fitted(engine, side, options, model, work)
    names = {"prefill": prefill.option_names, "decode": decode.option_names}
    set_ups = {}
    for name, faults in (("prefill", options.prefill_faults), ("decode", options.decode_faults)):
        with naming_options(names[name]):
            set_ups[name] = _faulty(faults)
    return _run(options, _Setup(model, work, configs, names, set_ups))


def _faulty(faults: str) -> Callable[[], None] | None:
    """What a rank's process does first. Raises ConfigError for faults that nobody knows."""
    if not faults:
        return None
    from kvxfer.testing.faults import install, parse_faults

    parse_faults(faults)
    return partial(install, faults)


def run_prefill(options: PrefillOptions) -> bool:
    """Serve until a rank dies (KvxferError), or the process is told to end. Returns whether nothing
    was left when it had drained.
    """
    listen = parse_address("--listen", options.listen)
    side = options.side
    model = read_model(options, (side,))
    (side,) = place_sides((side,), count_cuda_devices)
    num_blocks = side.num_blocks or _SERVER_BLOCKS
    host = {"host": listen.host.strip("[]")}
    ports = {"port": options.kv_port, "data_port": options.kv_data_port}
    kv = settings(options, given=ports, defaults=host)
    config = msgspec.structs.replace(
        transfer_engine(Role.PREFILL, side, options, model, kv),
        num_blocks=num_blocks,
        max_model_len=num_blocks * side.block_size,
        max_num_seqs=SERVER_SEQS,
        digests=options.digests,
        metrics=options.metrics,
    )
    names = side.option_names | {
        "host": "--listen, or KVXFER_HOST",
        "pool": "--block-size, --num-blocks",
    }
    check_memory(needs_of(config, model, names), free_host_nbytes())
    config = msgspec.structs.replace(config, max_model_len=longest_request(config, model))
    console = make_console()
    with naming_options(names), EngineGroup(config, host=listen.host, port=listen.port) as group:
        console.print(
            f"prefill: {group.endpoint} serves {model_name(options)} "
            f"(TP {side.tp_size}, block {side.block_size}, {side.layout}{_where(config)}), "
            f"KV at {group.kv_endpoint}{_metrics(group)}; end with ctrl-C",
            soft_wrap=True,
        )
        try:
            while True:
                wait(list(group.sentinels))
                group.check()
        except ToldToEnd as told:
            if told.number != signal.SIGTERM:
                raise
            return _drain(group, kv.drain_timeout_s, console)


def _drain(group: EngineGroup, timeout_s: float, console: Console) -> bool:
    """Once told to end; whoever is told again ends at once."""
    time.sleep(_ONE_ORDER_S)
    heed_signals()
    console.print(f"prefill: drains, for {timeout_s:g} s at most; SIGTERM again ends it at once")
    is_empty = group.drain(timeout_s)
    if not is_empty:
        log.warning("drain: expected nothing to be left within %g s, and something is", timeout_s)
    return is_empty


def run_decode(options: DecodeOptions) -> bool:
    """The decode side, against a prefill engine elsewhere. Returns whether all is well."""
    prefill_at = parse_address("--prefill", options.prefill)
    side = options.side
    model = read_model(options, (side,))
    work = read_work(options, model)
    (side,) = place_sides((side,), count_cuda_devices)
    host = {"host": address_towards(prefill_at)}
    ports = {"port": options.kv_port, "data_port": options.kv_data_port}
    kv = settings(options, given=ports, defaults=host)
    engine = transfer_engine(Role.DECODE, side, options, model, kv)
    engine = msgspec.structs.replace(engine, metrics=options.metrics)
    configs = {"decode": fitted(engine, side, options, model, work)}
    names = {"decode": side.option_names | {"host": "KVXFER_HOST"}}
    setup = _Setup(model, work, configs, names, prefill_at=f"tcp://{prefill_at}")
    return _run(options, setup, options.wait_s)


@dataclass(frozen=True, slots=True)
class _Setup:
    """What a run starts: the engines of ``configs``, and whose options are in ``names``.

    ``set_ups``: what the ranks of an engine do first, by its name. ``prefill_at``: the prefill
    engine, where it is not among them.
    """

    model: ModelConfig
    work: Work
    configs: Mapping[str, EngineConfig]
    names: Mapping[str, Mapping[str, str]]
    set_ups: Mapping[str, Callable[[], None] | None] = field(default_factory=dict)
    prefill_at: str | None = None

    def needs(self) -> Iterator[Need]:
        """What all engines take of this host's memory."""
        # Nothing but the work decides the size of the one that the others are compared with
        of_single = {"pool": "--max-new-tokens, --prompts"}
        for name, config in self.configs.items():
            yield from needs_of(config, self.model, self.names.get(name, of_single))

    def text(self, options: RunOptions) -> str:
        sides = [
            f"{name} TP {c.tp_size} block {c.block_size} {c.layout}{_where(c)}"
            for name, c in self.configs.items()
        ]
        prompts = f"{len(self.work.prompts)} prompts"
        return f"model {model_name(options)}, {prompts}; {'; '.join(sides)}"


def _run(options: RunOptions, setup: _Setup, wait_s: float = 0.0) -> bool:
    """A prefill engine elsewhere may be away for ``wait_s``. Returns whether all is well."""
    if options.verify:
        device = setup.configs["decode"].rank_devices[0]
        single = single_engine(options, setup.model, setup.work, device=device)
        setup = replace(setup, configs={**setup.configs, "single": single})
    check_memory(tuple(setup.needs()), free_host_nbytes())
    decode_text = text_decoder(options.model)
    console = make_console()
    with ExitStack() as stack:
        stack.enter_context(stderr_above(console))
        engines = _start(setup, wait_s, stack, console, setup.text(options))
        started_s = time.monotonic()
        ended: KvxferError | ToldToEnd | None = None
        with progress_bar(console) as progress:
            replay = Replay(
                setup.work,
                prefill=engines["prefill"],
                decode=engines["decode"],
                single=engines.get("single"),
                on_load_failure=options.on_load_failure,
                progress=progress,
                dispatch=options.dispatch,
            )
            try:
                replay.run()
            except (KvxferError, ToldToEnd) as e:
                ended = e  # what is over by now is shown and written all the same
        results = replay.results()
        if decode_text is not None:
            results = [msgspec.structs.replace(r, text=decode_text(r.token_ids)) for r in results]
        summary = summarise(
            results,
            tokens_decide=setup.model.dtype == "float32",
            wall_s=time.monotonic() - started_s,
            may_recompute=options.allow_recompute,
            num_planned=len(setup.work.prompts),
        )
        show(console, results, summary)
        if options.json is not None:
            asked = {} if ended else engines
            infos = {name: info for name, engine in asked.items() if (info := _info(engine))}
            write_json(options.json, facts(results, summary, engines=setup.configs, infos=infos))
        if ended is not None:
            raise ended
        return summary.is_good


def _start(
    setup: _Setup, wait_s: float, stack: ExitStack, console: Console, text: str
) -> dict[str, RunEngine]:
    engines: dict[str, RunEngine] = {}
    groups = {
        name: stack.enter_context(EngineGroup(config, set_up=setup.set_ups.get(name)))
        for name, config in setup.configs.items()
    }
    if setup.prefill_at is not None:
        kv, name = setup.configs["decode"].kv, Role.PREFILL.value
        client = RpcClient(setup.prefill_at, connect_timeout_s=wait_s, kv=kv, engine_id=name)
        remote = RunEngine(client, come_back_s=wait_s)
        stack.callback(lambda: remote.client.close())  # it may be another one by then
        engines["prefill"] = remote
    console.print(text, soft_wrap=not console.is_terminal)
    for name, group in groups.items():
        with naming_options(setup.names.get(name, {})):
            kv = setup.configs[name].kv
            client = RpcClient(group.endpoint, connect_timeout_s=_INFO_S, kv=kv)
            engines[name] = RunEngine(stack.enter_context(client), group)
            if group.metrics_endpoint:
                console.print(f"{name}{_metrics(group)}", soft_wrap=not console.is_terminal)
    return engines


def _metrics(group: EngineGroup) -> str:
    return f", metrics at {group.metrics_endpoint}" if group.metrics_endpoint else ""


def _where(config: EngineConfig) -> str:
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
