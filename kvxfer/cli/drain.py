"""What ``kvxfer drain`` does: tells every rank of an engine to drain, and waits until none has
anything open.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

import zmq

from kvxfer.cli.options import DrainOptions, naming_options, parse_address
from kvxfer.config import Config, load_config
from kvxfer.connector.control import HARD_LIMIT_NBYTES
from kvxfer.connector.peer_session import Failure
from kvxfer.doctor.engines import greeting
from kvxfer.doctor.host import why_unreachable
from kvxfer.errors import ConfigError, KvxferError, PeerLost
from kvxfer.transfer.manifest import RankManifest, parse_endpoint
from kvxfer.transfer.wire import Drain, Draining, Malformed, Ping, decode_to_sink, encode
from kvxfer.transports.channel import Bounds, Dealer
from kvxfer.transports.guard import nearest_endpoint
from kvxfer.transports.key_folder import with_folder_keys

ASLEEP_S = 3.0
"""An engine whose scheduler has heard nothing for so long sleeps: nothing waits in it. Awake it
hears within two steps."""
_AGAIN_S = 0.1


def run_drain(options: DrainOptions) -> bool:
    """Whether the engine is empty, or has ended, where that is waited for. Raises KvxferError for
    an engine that is not reached, and for one that takes no such order from here.
    """
    with naming_options():
        config = with_folder_keys(load_config({}).config)
    endpoint = endpoint_of(config, options.endpoint)
    timeout_s = options.timeout_s or config.drain_timeout_s
    if problem := why_unreachable(*parse_endpoint(endpoint), config.connect_timeout_s):
        raise PeerLost(f"{endpoint}: {problem}")
    with greeting(config, endpoint) as greeted:
        if isinstance(greeted, Failure):
            raise PeerLost(greeted.detail)
    engine_id, num_ranks = greeted.manifest.engine_id, len(greeted.manifest.ranks)
    # Before anything is said to it: without an address it may be another than was meant.
    print(f"drain: engine {engine_id} at {endpoint}, {num_ranks} ranks", flush=True)
    with ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        ranks = [
            stack.enter_context(closing(_connect(context, config, rank)))
            for rank in greeted.manifest.ranks
        ]
        return _drain(ranks, engine_id, config, timeout_s, waits=options.wait)


def endpoint_of(config: Config, given: str | None) -> str:
    """Of the front door: the one given, else where an engine with these settings listens."""
    if given is not None:
        return f"tcp://{parse_address('ENDPOINT', given.removeprefix('tcp://'))}"
    port = config.for_engine(gives_kv=True, num_ranks=1).for_rank(0).port
    if not isinstance(port, int) or not port:
        raise ConfigError(
            f"ENDPOINT: expected HOST:PORT, got none, and port ({port}) is no single port; "
            "name the engine's"
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"tcp://{host}:{port}"


def _connect(context: zmq.Context[zmq.Socket[bytes]], config: Config, rank: RankManifest) -> Dealer:
    """Over the Unix socket beside the port, which says whose process this is; with keys over the
    port itself.
    """
    key, where = rank.curve_public_key, rank.control_endpoint
    where = where if key is not None else nearest_endpoint(where)
    bounds = Bounds(HARD_LIMIT_NBYTES, HARD_LIMIT_NBYTES, 1000)
    return Dealer(context, config, bounds, where, key, word=encode(Ping()), reconnects=True)


def _drain(
    ranks: Sequence[Dealer], engine_id: str, config: Config, timeout_s: float, *, waits: bool
) -> bool:
    until_s, zero_since_s, said = time.monotonic() + timeout_s, None, -1
    while True:
        stands = [each for rank in ranks if (each := _ask(rank, config.connect_timeout_s))]
        num_open = sum(each.num_open for each in stands)
        now_s = time.monotonic()
        if not stands:
            print(f"drain: engine {engine_id} has ended")
            return True
        if num_open != said:
            print(f"drain: engine {engine_id} takes nothing new; {num_open} open", flush=True)
            said = num_open
        zero_since_s = None if num_open else zero_since_s or now_s
        is_heard = all(each.is_heard for each in stands)
        if not waits:
            return True
        if zero_since_s is not None and (is_heard or now_s - zero_since_s >= ASLEEP_S):
            print(f"drain: engine {engine_id} is empty")
            return True
        if now_s >= until_s:
            print(f"drain: engine {engine_id}: expected it to be empty within {timeout_s:g} s")
            return False
        time.sleep(_AGAIN_S)


def _ask(rank: Dealer, timeout_s: float) -> Draining | None:
    """How a rank stands; None once it has gone. Raises KvxferError if it takes no such order from
    here, PeerLost without an answer.
    """
    rank.send(encode(Drain()))
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        rank.socket.poll(10)
        for frames in rank.receive():
            match decode_to_sink(frames[0].buffer):
                case Draining() as stand:
                    return stand
                case Malformed(detail):
                    raise KvxferError(f"{rank.endpoint}: {detail}")
        if rank.why_ended() is not None:
            return None
    raise PeerLost(
        f"{rank.endpoint}: no answer within {timeout_s:g} s; {rank.problem or 'is it running?'}"
    )
