"""Threads that a process cannot do without."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from quire.log import get_logger
from quire.utils.process import use_slice

log = get_logger(__name__)

THREAD_FAILED_STATUS = 70
"""Exit status of a process that an essential thread has ended."""
BACKGROUND_NICENESS = 10
"""10 % of a core that others use. Not SCHED_IDLE: such a thread got the interpreter's lock and then no core for 5.5 s,
while other processes used all of them, and nobody else could run (benchmarks/structured.md)."""
PROMPT_SLICE_NS = 100_000
"""The shortest that Linux has."""


def give_way() -> None:
    """Have the calling thread compute only where a core is nearly free, for good: no thread may raise itself again.

    Threads that have ops call `Ops.give_way`, which does more.

    Call it just before native code that releases the interpreter's lock, and do little after it: while this thread has
    the lock, the others of the process wait for it.
    """
    if sys.platform == "linux":  # elsewhere it would count for the process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)


def wake_promptly() -> None:
    """Have the calling thread get a core as soon as it wakes up, for work that takes a fraction of a millisecond.

    It gets no larger share, but a shorter slice (Linux 6.12 and newer; elsewhere nothing changes): one that wakes up on
    the core of a thread with a longer one takes it at once. Otherwise it waits for the next tick, up to 4 ms, though
    another core is idle or has a thread that would give way. Threads and processes that it starts are ordinary ones.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if niceness >= 0:  # those that it starts would lose a negative one
            use_slice(PROMPT_SLICE_NS, niceness)


def start_essential(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread; when `run` raises, log the exception and end the process.

    Without the thread the process would go on half alive: nobody would hear of a new core, or send heartbeats. Whoever
    supervises a process that has ended knows what to do.
    """
    thread = threading.Thread(target=_run_or_exit, args=(name, run), name=name, daemon=True)
    thread.start()
    return thread


def _run_or_exit(name: str, run: Callable[[], None]) -> None:
    try:
        run()
    except BaseException:
        with contextlib.suppress(BaseException):  # the log may be on a full disk
            log.critical("thread %s failed; process %d ends", name, os.getpid(), exc_info=True)
            sys.stderr.flush()
        os._exit(THREAD_FAILED_STATUS)
