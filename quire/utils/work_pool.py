"""`WorkPool`: a few threads for the work that requests cause, bounded, fair between owners, given up when nobody waits.

The default executor of asyncio has none of this: its queue has no bound, what a client that left has asked for is still
done, and the end of the process waits for it. Threads here are daemons, and a job ends at its next `check_cancelled()`
once its coroutine was cancelled or the pool was closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from quire.errors import EngineOverloaded, EngineUnavailable
from quire.utils.cancellation import cancelled_by
from quire.utils.threads import start_essential

P = ParamSpec("P")
T = TypeVar("T")

owner: ContextVar[int] = ContextVar("work_owner", default=-1)
"""On whose behalf work is asked for: the index of an API key, or -1."""
is_heavy: ContextVar[bool] = ContextVar("work_is_heavy", default=False)
"""Whether the work of this request may take long. Such work never takes the last threads, so that others get along."""


TURN_S = 0.002
"""A job that takes longer is a long one: it rests after each such turn, and only one of them computes at a time. The
event loop and the engine's threads want the same cores, and a step of the engine waits for the slowest of its threads.
New jobs do not wait for long ones."""
MAX_PAUSE_S = 0.05
MAX_HEAVY = 2
"""Heavy jobs begun and not ended: what they have made so far takes memory."""

_turn = threading.Lock()
"""Held by the long job that computes. One for the process, as is the interpreter's lock."""


class WorkAbandoned(BaseException):
    """Ends a job whose result nobody waits for. No Exception: nothing between may take it for a failure."""


class _Job:
    """A call, and the future of the coroutine that waits for it."""

    __slots__ = (
        "busy_before_s",
        "call",
        "context",
        "future",
        "is_abandoned",
        "is_long",
        "is_waiting",
        "queue",
        "turn_began_at",
    )

    def __init__(self, call: Callable[[], Any], context: Context) -> None:
        self.call = call
        self.context = context
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_abandoned = False
        self.is_waiting = True
        self.is_long = False
        self.turn_began_at = 0.0
        self.busy_before_s = 0.0
        self.queue = (owner.get(), is_heavy.get())

    def run(self) -> Any:
        """The result of the call; `check_cancelled` ends it once it is abandoned."""
        self._begin_turn()
        try:
            with cancelled_by(self._check):
                return self.call()
        finally:
            if self.is_long:
                _turn.release()

    def _check(self) -> None:
        if self.is_abandoned:
            raise WorkAbandoned
        if time.monotonic() - self.turn_began_at > TURN_S:
            self._rest()

    def _rest(self) -> None:
        """Sleep as long as the turn took; longer where it took long because others wanted the core or the lock."""
        took_s, busy_s = time.monotonic() - self.turn_began_at, time.thread_time() - self.busy_before_s
        if self.is_long:
            _turn.release()
        time.sleep(min(took_s * took_s / max(busy_s, 0.001), MAX_PAUSE_S))
        _turn.acquire()
        self.is_long = True
        self._begin_turn()

    def _begin_turn(self) -> None:
        self.turn_began_at, self.busy_before_s = time.monotonic(), time.thread_time()


class WorkPool:
    """Threads that take jobs from queues: one queue per owner, and one more for the owner's heavy jobs, in turn."""

    def __init__(self, *, num_threads: int = 12, max_waiting: int = 1024, max_waiting_per_owner: int = 0) -> None:
        """`max_waiting_per_owner` 0 sets no limit of its own."""
        self.num_waiting = 0
        """Jobs that no thread has begun."""
        self.num_running = 0
        self.on_refused: Callable[[], None] = lambda: None
        """Called when a job finds the pool full."""
        self._num_threads = num_threads
        self._max_heavy = min(MAX_HEAVY, num_threads)
        self._max_per_owner = num_threads - num_threads // 4
        self._max_waiting = max_waiting
        self._max_waiting_per_owner = max_waiting_per_owner
        self._queues: dict[tuple[int, bool], deque[_Job]] = {}
        """Only those that are not empty; the one to be served next is first."""
        self._running: set[_Job] = set()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._closed = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call in one of the threads. Cancelling abandons it: it does not run, or ends soon.

        Raises: EngineOverloaded when too much waits; EngineUnavailable when the pool is closed; what the call raises.
        """
        job = _Job(partial(function, *args, **kwargs), copy_context())
        try:
            self._put(job)
        except EngineOverloaded:
            self.on_refused()
            raise
        try:
            return await job.future  # type: ignore[no-any-return]
        finally:
            self._abandon(job)

    def close(self) -> None:
        """Abandon everything; does not wait for the threads. Idempotent."""
        with self._changed:
            self._closed = True
            jobs = [*self._running, *(job for queue in self._queues.values() for job in queue)]
            self._queues.clear()
            self.num_waiting = 0
            self._changed.notify_all()
        for job in jobs:
            job.is_abandoned = True
            _deliver(job, None, _closed())

    def _put(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise _closed()
            self._check_room(job.queue[0])
            self._queues.setdefault(job.queue, deque()).append(job)
            self.num_waiting += 1
            if len(self._threads) < self._num_threads and self.num_running + self.num_waiting > len(self._threads):
                self._threads.append(start_essential("quire-work", self._work))
            self._changed.notify()

    def _check_room(self, key: int) -> None:
        own = sum(len(queue) for (who, _), queue in self._queues.items() if who == key)
        if self.num_waiting >= self._max_waiting:
            raise EngineOverloaded(
                f"the queue of requests to read and tokenise is full, at {self.num_waiting}; try again",
                retry_after=1,
            )
        if self._max_waiting_per_owner and own >= self._max_waiting_per_owner:
            raise EngineOverloaded(
                f"{own} of the requests to read and tokenise are of this API key, its limit; try again",
                retry_after=1,
            )

    def _abandon(self, job: _Job) -> None:
        """Take a job out of its queue, or have it end at its next check; nothing happens to one that is done."""
        job.is_abandoned = True
        with self._changed:
            if job.is_waiting and not self._closed:
                self._queues[job.queue].remove(job)
                self._has_left_queue(job)

    def _work(self) -> None:
        while (job := self._take()) is not None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.context.run(job.run)
            except WorkAbandoned:
                error = _closed()  # nobody hears of it unless the pool was closed
            except BaseException as raised:
                error = raised
            self._finish(job)
            _deliver(job, result, error)
            del job, result, error  # nothing is kept while this thread waits

    def _take(self) -> _Job | None:
        """The next job, once there is one that may run; None when the pool is closed."""
        with self._changed:
            while not self._closed:
                key = self._next_queue()
                if key is None:
                    self._changed.wait()
                    continue
                queue = self._queues.pop(key)
                self._queues[key] = queue  # at the end: the others come first
                job = queue.popleft()
                self._has_left_queue(job)
                self.num_running += 1
                self._running.add(job)
                return job
            return None

    def _has_left_queue(self, job: _Job) -> None:
        job.is_waiting = False
        self.num_waiting -= 1
        if not self._queues[job.queue]:
            del self._queues[job.queue]

    def _next_queue(self) -> tuple[int, bool] | None:
        owners = Counter(job.queue[0] for job in self._running)
        has_room = sum(job.queue[1] for job in self._running) < self._max_heavy
        may_run = (key for key in self._queues if owners[key[0]] < self._max_per_owner and (has_room or not key[1]))
        return next(may_run, None)

    def _finish(self, job: _Job) -> None:
        with self._changed:
            self.num_running -= 1
            self._running.discard(job)
            self._changed.notify()  # a heavy job may have waited for this one's place


def _deliver(job: _Job, result: Any, error: BaseException | None) -> None:
    """Wake the coroutine that waits, from any thread."""

    def settle() -> None:
        if job.future.done():
            return
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        job.future.get_loop().call_soon_threadsafe(settle)


def _closed() -> EngineUnavailable:
    return EngineUnavailable("the server is shutting down; another one may serve this request", retry_after=1)
