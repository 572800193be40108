"""The one thread of a worker that owns its control sockets, sessions and timers. It copies no more
KV at once than ``copy_thread.SMALL_NBYTES``.

Other threads hand it work with :meth:`IoThread.post`; everything else is called on the thread
itself. One round of the loop runs the posted calls, then the sockets, the transports, the deferred
calls, and the timers that are due. Posted calls come before sockets, because a message that answers
one may already have arrived. Sockets come before timers, because a Release that has arrived must
not lose to a lease that ran out meanwhile.

Each call that releases the GIL may wait 0.2 to 5 ms behind the engine's thread to get it back. So
work that nobody waits for comes last: deferred messages, and clearing the wake. The engine's thread
may take this thread's place while it sleeps (:mod:`kvxfer.connector.borrower` says why). The thread
that runs holds the lock ``_turn``; the IO thread releases it to poll. ZeroMQ may still look at its
sockets then, so a borrower leaves them alone.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, TypeVarTuple

import zmq

from kvxfer.log_limit import LogLimit
from kvxfer.transports.wake_up import TimerFd, WakeUp

ZmqSocket = zmq.Socket[bytes]
Call = Callable[[], object]
_Later = tuple[Callable[..., object], tuple[Any, ...]]
Args = TypeVarTuple("Args")
Now = Callable[[], float]

LATE_S = 0.25
"""A thread whose timers come this late was stopped or starved, and so was ZeroMQ: it may hold
unread messages.
"""
CATCH_UP_MS = 20
"""How long a late thread lets ZeroMQ read before it believes that nothing has come."""
STANDS_S = 5.0
"""A round takes milliseconds. One that takes so long stands: in a call that does not return, or
stopped from outside.
"""
OFTEN_S = 1.0
"""Who looks whether it stands looks as often at least, or begins anew."""
FAILED_S = 0.01
"""Between two polls that fail, which might follow each other without end."""
MOST_PLACES = 64
"""Of failures of a minute that are written."""
LEISURE_S = 0.02
"""What a borrower has left to the thread is done so much later at most. The borrower is the
engine's thread, and both would want the interpreter while it launches its step's work, and with
async scheduling that of the next: on two H200s a first token is out 9 ms later, and 0.3 of these
went to a thread that came after 5.
"""
MOST_CANCELLED = 128
"""Timers that lie there until their time. Three of each load would, of clocks of up to 300 s, and a
collection of Python's garbage looks at them all.
"""
OVERDUE_S = 0.1
"""Timers of a late thread wait for sockets no longer than this: a flood must not stop the clocks.
Each reader has a turn (``visitors``) and what it began, so that a round beside it is short, too.
"""
ROUNDS_AHEAD = 4
"""Others wait for so many rounds. A clock opens offers, and waited for floods to pause: beside
10,000 pulls a second a load took 5.6 ms (median) instead of 1.3, and takes 3.6.
"""

_log = logging.getLogger("kvxfer.connector")


class Pollable(Protocol):
    """The part of a transport that the loop uses."""

    def pollables(self) -> Sequence[ZmqSocket | int]:
        """The sockets and file descriptors to be polled for reading now."""

    @property
    def is_idle(self) -> bool:
        """Nothing can have happened unless one of its pollables is readable."""


_Member = TypeVar("_Member", bound=Pollable)


class Timer:
    """One call at one time; ``cancel`` may be called at any time on the IO thread."""

    __slots__ = ("_io", "call")

    def __init__(self, io: IoThread, call: _Later) -> None:
        self._io = io
        self.call: _Later | None = call

    def cancel(self) -> None:
        if self.call is not None:
            self.call = None
            self._io.num_cancelled += 1


@dataclass(slots=True, eq=False)
class _Group:
    """A transport, the handler to call when something may have happened on it, and its polled
    sockets.
    """

    member: Pollable
    handler: Callable[[Any], object]
    polled: tuple[ZmqSocket | int, ...] = field(default=())


class IoThread:
    """A poll loop with an inbox, timers and sockets.

    Args:
        on_error: called for each exception that a handler raised. The exception is logged, and the
            loop goes on.
        within: a context manager that is entered anew in each round, around the handlers. If that
            fails, handlers run without it.
    """

    def __init__(
        self,
        name: str,
        on_error: Call,
        now: Now = time.monotonic,
        within: AbstractContextManager[object] | None = None,
    ) -> None:
        self.now = now
        self._on_error = on_error
        self._within = within
        self.posted: deque[_Later] = deque()
        """Calls that wait for :meth:`run_posted`."""
        self._wake_up = WakeUp()
        self._awake = False
        self._is_wanted = False
        self.deferred: deque[_Later] = deque()
        """Calls that wait for :meth:`run_deferred`."""
        self._is_leaving = False
        self._turn = threading.Lock()
        self._entered: AbstractContextManager[object] | None = None
        self.is_lent = False
        """Whoever runs is not the thread itself: what touches a socket is to be deferred."""
        self._poller = zmq.Poller()
        self._poller.register(self._wake_up.fd, zmq.POLLIN)
        self._leisure = TimerFd()
        self._has_leisure = False
        """The timer is set, for what a borrower has left."""
        self._seen_through_by: int | None = None
        """The borrower, if it sees through itself what it begins."""
        self._poller.register(self._leisure.fd, zmq.POLLIN)
        self._handlers: dict[ZmqSocket, Call] = {}
        self._groups: list[_Group] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self.num_cancelled = 0
        """Timers, since those were last thrown away that have no call any more."""
        self._order = itertools.count()
        self._stopping = False
        self._num_rounds = 0
        self._seen = (-1, 0.0, 0.0)
        """By ``stands``: the last round, since when, and when it was looked at."""
        self._written: LogLimit[tuple[str, int]] = LogLimit(MOST_PLACES)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    # -------------------------------------------------- from any thread

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[*Args], object], *args: *Args) -> bool:
        """Run ``call(*args)`` on the thread, in the order of posting. Never blocks. False once the
        thread has been told to end: the call may run or not.
        """
        self.posted.append((call, args))
        self.wake()
        return not self._stopping

    def wake(self) -> None:
        self._is_wanted = True  # first: the thread reads this after it has announced that it sleeps
        if self._awake:
            return
        self._awake = True
        self._wake_up()

    def attend(self) -> None:
        """A transport has something for a round: as ``wake``, unless whoever has just begun it sees
        it through.
        """
        if self._seen_through_by == threading.get_ident():
            self._look_at_leisure()
        else:
            self.wake()

    def stands(self, for_s: float = STANDS_S) -> bool:
        """Whether the thread has begun no round for so long. For a thread that has timers, and for
        the one thread that looks often.
        """
        now_s = time.monotonic()
        seen, since_s, looked_s = self._seen
        if seen != self._num_rounds or now_s - looked_s > OFTEN_S:  # else both may have stood
            seen, since_s = self._num_rounds, now_s
        self._seen = (seen, since_s, now_s)
        return now_s - since_s >= for_s

    def stack(self) -> str:
        """Where the thread is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"

    def borrow(self, *, sees_through: bool = False) -> bool:
        """Take the thread's place, if the thread sleeps and no posted call waits; else False. Never
        waits. :meth:`give_back` must follow; until then the caller does only short work and touches
        no socket. ``sees_through``: it comes back for what it begins, and the thread looks at that
        LEISURE_S later.
        """
        if self.posted or self._stopping or not self._turn.acquire(blocking=False):
            return False
        self.is_lent = self._awake = True  # nobody need wake the thread now
        self._seen_through_by = threading.get_ident() if sees_through else None
        if self._within is not None:
            self._enter(self._within)
        return True

    def give_back(self) -> None:
        """The thread goes on with the calls that were posted meanwhile; with those that were
        deferred, and what is seen through, in its next round, LEISURE_S later at most.
        """
        if self._entered is not None:
            self._leave(self._entered)
        if self.deferred:
            self._look_at_leisure()
        self._seen_through_by = None
        self.is_lent = self._awake = False
        self._turn.release()
        if self._is_wanted or self.posted:
            self.wake()

    def _look_at_leisure(self) -> None:
        """In a borrower's turn: the thread's next round comes LEISURE_S after the first call."""
        if not self._has_leisure:
            self._has_leisure = True
            self._leisure.set(LEISURE_S)

    def stop(self, timeout_s: float) -> bool:
        """Run what was posted, then end the thread. False if it did not end in time. Idempotent."""

        def end() -> None:
            self._stopping = True

        if self._thread.is_alive():
            self.post(end)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._wake_up.close()
        self._leisure.close()
        return True

    # -------------------------------------------------- on the thread or in its place (or before)

    def after(self, delay_s: float, call: Callable[[*Args], object], *args: *Args) -> Timer:
        if self.num_cancelled > max(MOST_CANCELLED, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self.num_cancelled = 0
        timer = Timer(self, (call, args))
        heapq.heappush(self._timers, (self.now() + delay_s, next(self._order), timer))
        return timer

    def defer(self, call: Callable[[*Args], object], *args: *Args) -> None:
        """Run ``call(*args)`` when everything else of this round has had its turn, in the order of
        deferring. For messages that nobody waits for: others call :meth:`run_deferred` first.
        """
        self.deferred.append((call, args))

    def run_deferred(self) -> None:
        """Run the deferred calls. Does nothing within a deferred call, because the rest follow it
        anyway, and nothing in a borrower's turn, because most deferred calls send.
        """
        if self._is_leaving or self.is_lent:
            return
        self._is_leaving = True
        while self.deferred:
            call, args = self.deferred.popleft()
            self.guard(call, *args)
        self._is_leaving = False

    def watch(self, socket: ZmqSocket, handler: Call) -> None:
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: ZmqSocket) -> None:
        """Stop watching; unknown sockets are ignored."""
        if self._handlers.pop(socket, None) is not None:
            self._poller.unregister(socket)

    def watch_group(self, member: _Member, handler: Callable[[_Member], object]) -> None:
        """Call ``handler(member)`` in every round; for an idle member only when one of its
        pollables is readable. The pollables are asked for anew in each round.
        """
        self._groups.append(_Group(member, handler))

    def unwatch_groups(self) -> None:
        """Stop watching all transports, before they are closed."""
        for group in self._groups:
            for socket in group.polled:
                self._poller.unregister(socket)
        self._groups = []

    def run_posted(self) -> int:
        """Run the calls posted so far; returns how many. Also called between receiving a message
        and handling it: calls that the engine thread posted before the message could be sent must
        take effect first.
        """
        num_posted = len(self.posted)
        for _ in range(num_posted):
            call, args = self.posted.popleft()
            self.guard(call, *args)
        return num_posted

    def guard(self, call: Callable[[*Args], object], *args: *Args) -> None:
        try:
            call(*args)
        except Exception:  # noqa: BLE001  # whatever it is, the loop goes on
            self._note_failure()

    def _note_failure(self) -> None:
        """Count it and write its stack, once a minute for each place: it may come in each round."""
        self._on_error()
        *_, (frame, line) = traceback.walk_tb(sys.exc_info()[2])
        if num := self._written.note((frame.f_code.co_filename, line), time.monotonic()):
            text = "%s: a handler failed (%d times); the loop goes on"
            _log.exception(text, self._thread.name, num)

    # -------------------------------------------------- the loop

    def _main(self) -> None:
        self._turn.acquire()
        while not self._stopping:
            self.guard(self._round)
        self.run_posted()  # calls whose post returned True before the end was seen

    def _round(self) -> None:
        self._serve(self._wait_ms())
        late_s = self.now() - self._timers[0][0] if self._timers else -1.0
        if late_s < 0:
            return
        if late_s <= LATE_S:
            for _ in range(ROUNDS_AHEAD):
                if not self._serve(0):
                    break
        else:
            self._serve(CATCH_UP_MS)
            until_s = self.now() + OVERDUE_S
            while self._serve(0) and self.now() < until_s:
                pass
        self._fire()

    def _serve(self, timeout_ms: int) -> bool:
        """Handle inbox, sockets and transports once. Returns whether there was anything to do."""
        self._num_rounds += 1
        for group in self._groups:
            self.guard(self._sync, group)
        self._awake = False  # later wakes write to ``fd``; an earlier one is seen in this poll
        ready = self._poll(timeout_ms)
        self._awake, self._is_wanted = True, False  # before the inbox is read
        if self._has_leisure:
            self._has_leisure = False
            self._leisure.set(0)
        readable = dict(ready)  # in the order of watching
        if self._within is not None:
            self._enter(self._within)
        try:
            num_posted = self._handle(readable)
        finally:
            if self._entered is not None:
                self._leave(self._entered)
        if self._wake_up.fd in readable:
            self._wake_up.clear()
        return bool(ready or num_posted)

    def _poll(self, timeout_ms: int) -> list[tuple[Any, int]]:
        """What is readable; nothing where that fails: the inbox and the timers have their turn."""
        self._turn.release()
        try:
            return self._poller.poll(0 if self._is_wanted else timeout_ms)
        except zmq.ZMQError:
            self._note_failure()
            time.sleep(FAILED_S)
            return []
        finally:
            self._turn.acquire()

    def _enter(self, within: AbstractContextManager[object]) -> None:
        """If it fails, the handlers that need it raise."""
        try:
            within.__enter__()
            self._entered = within
        except Exception as exc:  # noqa: BLE001  # whatever it is, the loop goes on
            _log.debug("%s: %s", self._thread.name, exc)

    def _leave(self, entered: AbstractContextManager[object]) -> None:
        self._entered = None
        self.guard(entered.__exit__, None, None, None)

    def _handle(self, readable: Mapping[Any, int]) -> int:
        """Handle what one poll has found. Returns how many posted calls were run."""
        num_posted = self.run_posted() if self.posted else 0
        for socket in readable:
            handler = self._handlers.get(socket)  # None if another handler has unwatched it
            if handler is not None:
                self.guard(handler)
        for group in self._groups:
            self.guard(self._look_at, group, readable)
        if self.deferred:
            self.run_deferred()
        return num_posted

    def _look_at(self, group: _Group, readable: Mapping[Any, int]) -> None:
        # With auto most wires of a rank are idle, and each costs a round 10 us, 40 on a cold
        # processor
        if not (readable.keys().isdisjoint(group.polled) and group.member.is_idle):
            group.handler(group.member)

    def _sync(self, group: _Group) -> None:
        wanted = tuple(group.member.pollables())
        if wanted == group.polled:
            return
        for socket in set(group.polled) - set(wanted):
            self._poller.unregister(socket)
        for socket in set(wanted) - set(group.polled):
            self._poller.register(socket, zmq.POLLIN)
        group.polled = wanted

    def _wait_ms(self) -> int:
        """Until the first timer; -1 without one. Rounded up: a timer never fires early."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return max(0, math.ceil((self._timers[0][0] - self.now()) * 1000))

    def _fire(self) -> None:
        now_s = self.now()
        while self._timers and self._timers[0][0] <= now_s:
            timer = heapq.heappop(self._timers)[2]
            call, timer.call = timer.call, None
            if call is not None:
                self.guard(call[0], *call[1])
        if self.deferred:
            self.run_deferred()
