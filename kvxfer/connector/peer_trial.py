"""The trial of the wires to one source engine, on a thread of its own.

The copy thread is not used: a trial may wait for the network, and loads from other peers must go on
meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import zmq

from kvxfer.connector.peer import Surroundings
from kvxfer.connector.peer_session import Failure
from kvxfer.errors import TransportUnavailable
from kvxfer.transfer.costs import REFERENCE_TOKENS, Workload
from kvxfer.transfer.manifest import RankId, RankManifest
from kvxfer.transfer.plan import Route
from kvxfer.transfer.pull import block_chunk_nbytes, pull_class, route_nbytes
from kvxfer.transfer.wire import Reason
from kvxfer.transports.choice import Choice, choose

Choices = dict[RankId, Choice]

_log = logging.getLogger("kvxfer.connector")


def workload_of(route: Route) -> Workload:
    """How many bytes a long prompt has on a route, and the least size of its chunks."""
    pulls = [pull_class(each, 0, REFERENCE_TOKENS) for each in route.classes]
    return Workload(route_nbytes(pulls), block_chunk_nbytes(pulls))


def start_trial(
    around: Surroundings,
    routes: Sequence[tuple[Route, RankManifest]],
    until_s: float,
    done: Callable[[Choices | Failure], object],
) -> None:
    """Try the wires to the source rank of each route, one after the other: trials side by side
    would share the link and measure too low a rate.

    Args:
        until_s: when all trials together must have ended (the IO thread's clock).
        done: called on the IO thread, unless this rank shuts down. It owns the choices from then
            on, and attaches or discards each.
    """

    def run() -> None:
        choices: Choices = {}
        result = _try_all(around, routes, until_s, choices)
        is_told = result is not None and around.io.post(done, result)
        if not is_told or result is not choices:
            _close(choices)

    threading.Thread(target=run, name="kvxfer-probe", daemon=True).start()


def discard(choices: Choices) -> None:
    """Discard choices that will not be attached. A thread closes what they hold open: CUDA may wait
    for other work of the GPU first.
    """
    if any(choice.trial.held for choice in choices.values()):
        threading.Thread(target=_close, args=(choices,), name="kvxfer-probe", daemon=True).start()


def _close(choices: Choices) -> None:
    for choice in choices.values():
        choice.trial.close()


def _try_all(
    around: Surroundings,
    routes: Sequence[tuple[Route, RankManifest]],
    until_s: float,
    choices: Choices,
) -> Choices | Failure | None:
    """The choices, filled in one after the other; why there are none; None at shutdown."""
    try:
        for route, source in routes:
            left_s = until_s - around.io.now()
            if left_s <= 0:
                return Failure(
                    Reason.TRANSPORT,
                    f"the wires of {len(routes)} ranks: expected their trials to end in time, "
                    f"{len(choices)} have",
                )
            choices[source.rank] = choose(
                around.transports,
                source,
                workload_of(route),
                classes=route.classes,
                min_gbps=around.config.min_gbps,
                timeout_s=left_s,
            )
    except TransportUnavailable as e:
        return Failure(Reason.TRANSPORT, str(e))
    except zmq.ContextTerminated:
        return None
    except Exception as e:  # noqa: BLE001  # whoever waits must hear of it
        if around.context.closed:  # a socket could not be made any more
            return None
        _log.exception("the trial of a wire failed")
        return Failure(Reason.TRANSPORT, f"{type(e).__name__}: {e}")
    return choices
