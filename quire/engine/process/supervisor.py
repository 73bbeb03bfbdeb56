"""`CoreSupervisor`: starts the core process, watches it, and starts it again.

Two things can go wrong and are told apart. *Lost*: the process has ended. *Stalled*: it is there but does nothing: it
was stopped, its heartbeat is silent, a step takes longer than any step should, or its start makes no progress. Either
is noticed within two seconds (a step that hangs: after `step_timeout` and ten times the longest step so far; a start
that hangs: after `startup_timeout`) and ends in the same way: the process is killed, whoever is attached hears
`CoreDown`, and a new process is started with the same configuration, a limited number of times in a window and after a
growing pause.

Before the first core was ready, one that ends by itself is not replaced: the next one would end in the same way.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.engine.identity import Identity
from quire.engine.process.protocol import (
    CONTROL,
    Attach,
    CoreConfigured,
    CoreFailed,
    CoreReady,
    Heartbeat,
    RestartCore,
    StartCore,
    StopCore,
    TraceWanted,
)
from quire.engine.process.restart_policy import RestartBudget, RestartPolicy
from quire.engine.process.trace_files import TraceFiles
from quire.errors import EngineDeadError, EngineError, QuireError, counted, from_wire
from quire.log import get_logger
from quire.messages.codec import MalformedFrame
from quire.messages.framed_socket import FramedSocket
from quire.observability.flight_recorder import create_memory, map_memory
from quire.utils.process import describe_exit, num_oom_kills, thread_states
from quire.utils.threads import start_essential

log = get_logger(__name__)

CORE_MODULE = "quire.engine.process.core_process"
TICK_S = 0.5
"""Somewhat longer than the pause between heartbeats, so that an idle supervisor wakes for nothing else."""
STOPPED_TICKS = 2
"""A silent process that is seen stopped so often in a row is stalled."""
ASLEEP_TICKS = 3
"""The same for one whose threads are all asleep, the one with the heartbeat too."""
STARVED_SILENCE_S = 15.0
"""So long may one be silent that could run but is not given the processor."""
STARTING_SILENCE_S = 120.0
"""So long, while libraries are read from a cold disk in one breath."""
LAST_PAGES_S = 1.0
"""A core that is to end looks at the clock between a few pages, so it may end this much later than it should."""
OUTSIDE_SIGNALS = frozenset(-number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
"""Exit statuses of a process that somebody else ended."""


@dataclass(frozen=True, slots=True)
class CoreUp:
    """A core is ready; `connection` is this subscriber's own."""

    connection: socket.socket
    identity: Identity


@dataclass(frozen=True, slots=True)
class CoreDown:
    """The core is gone and will be started again."""

    reason: str
    crashed: bool
    """It ended by itself, for want of memory, or hung; otherwise somebody ended it from outside."""


@dataclass(frozen=True, slots=True)
class CoreGone:
    """There will be no core any more."""

    error: QuireError


@dataclass(frozen=True, slots=True)
class CoreStarting:
    """A core has reached another stage of its start."""

    stage: str


CoreEvent = CoreConfigured | CoreStarting | CoreUp | CoreDown | CoreGone


class CoreSource(Protocol):
    """Where connections to a core come from."""

    def subscribe(self, sink: Callable[[CoreEvent], None]) -> None:
        """Hear of the core, from another thread: CoreConfigured once, then CoreUp and CoreDown in turns, or CoreGone;
        and before each CoreUp, CoreStarting with every stage.

        Called again with the same sink, it gives a new connection to one that has lost its own.
        """

    def close(self, flush_s: float = 0.0) -> None:
        """Let the core go; harmless when called again. It has so many seconds to write what is cached to --kv-disk."""


@dataclass(frozen=True, slots=True)
class _End:
    reason: str
    crashed: bool
    error: QuireError | None = None
    """Set when starting again would end in the same way."""


class _CoreProcess:
    """One core process and what is known of it."""

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        self.control = FramedSocket(ours, CONTROL)
        recorder = create_memory()
        self.memory = map_memory(recorder)
        """Of its flight recorder; it outlives the process."""
        try:
            with theirs:
                command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid()), str(recorder)]
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), recorder],
                    process_group=0,  # Ctrl-C is for the front, which drains
                )
        finally:
            os.close(recorder)
        self.identity: Identity | None = None
        """Of what it computes; None until it is ready."""
        self.heartbeat = Heartbeat()
        self.failure: CoreFailed | None = None
        self.heard_at = self.progressed_at = time.monotonic()
        self.ticks_stopped = 0
        self.ticks_asleep = 0
        self.num_oom_kills = num_oom_kills()

    @property
    def is_ready(self) -> bool:
        """Whether it can step."""
        return self.identity is not None

    def attach(self) -> socket.socket:
        """A new connection to the core.

        Raises: OSError when it has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.control.send(Attach(), theirs.fileno())
            except OSError:
                ours.close()
                raise
        return ours

    def beat(self, heartbeat: Heartbeat) -> None:
        """Take in a heartbeat."""
        before, self.heartbeat = self.heartbeat, heartbeat
        if (heartbeat.stage, heartbeat.progress) != (before.stage, before.progress):
            self.progressed_at = time.monotonic()

    def excuse_silence(self) -> None:
        """It was the supervisor that did not run."""
        self.heard_at = self.progressed_at = time.monotonic()

    def stall(self, policy: RestartPolicy) -> str | None:
        """Why the process counts as stalled, or None. Called once per tick, after its messages were read."""
        silence_s = time.monotonic() - self.heard_at
        if silence_s < TICK_S:
            self.ticks_stopped = self.ticks_asleep = 0
        else:
            states = thread_states(self.process.pid)
            self.ticks_stopped = self.ticks_stopped + 1 if states and not states.strip("T") else 0
            self.ticks_asleep = self.ticks_asleep + 1 if states and not states.strip("S") else 0
            if self.ticks_stopped >= STOPPED_TICKS:
                return "was stopped"
            limit_s = STARVED_SILENCE_S if self.is_ready else min(STARTING_SILENCE_S, policy.startup_timeout)
            if silence_s > limit_s or (self.is_ready and self.ticks_asleep >= ASLEEP_TICKS):
                return f"has given no sign of life for {silence_s:.1f} s"
        if not self.is_ready:
            return self._start_stall(policy)
        limit_s = policy.step_timeout + 10 * self.heartbeat.longest_step_s
        if self.heartbeat.step_s > limit_s:
            return f"has spent {self.heartbeat.step_s:.0f} s in one step (limit {limit_s:.0f} s, --step-timeout)"
        return None

    def _start_stall(self, policy: RestartPolicy) -> str | None:
        idle_s = time.monotonic() - self.progressed_at
        if idle_s <= policy.startup_timeout:
            return None
        stage = self.heartbeat.stage or "process"
        limit = f"limit {policy.startup_timeout} s, --startup-timeout"
        return f"has made no progress for {idle_s:.0f} s in stage {stage!r} of its start ({limit})"

    def end(self) -> None:
        """Kill and reap."""
        self.control.close()
        self.process.kill()
        self.process.wait()


class CoreSupervisor:
    """The core process of one engine, and those that replace it. One thread does everything."""

    def __init__(self, args: EngineArgs, policy: RestartPolicy | None = None, module: str = CORE_MODULE) -> None:
        """`module` is what a core process runs."""
        self._module = module
        self._order: StartCore | RestartCore = StartCore(args=args)
        self._policy = policy or RestartPolicy()
        self._sinks: list[Callable[[CoreEvent], None]] = []
        self._lock = threading.Lock()
        self._new_sinks: deque[Callable[[CoreEvent], None]] = deque()
        self._config: QuireConfig | None = None
        self._gone: CoreGone | None = None
        self._budget = RestartBudget(self._policy)
        self._closing = False
        self._flush_until = math.inf
        """When the core that is to end is killed."""
        self._has_worked = False
        """Some core has been ready."""
        self._core: _CoreProcess | None = None
        self._traces = TraceFiles(self._policy.trace_dir)
        self._wake, self._woken = socket.socketpair()
        # The kernel ends the core with the thread that started it, so one thread starts all cores and stays.
        self._thread = start_essential("quire-supervisor", self._run)

    @property
    def core_pid(self) -> int | None:
        """The core's process id; None between two cores."""
        core = self._core
        return None if core is None else core.process.pid

    @property
    def num_restarts(self) -> int:
        """Restarts in the current window."""
        return len(self._budget)

    def subscribe(self, sink: Callable[[CoreEvent], None]) -> None:
        """See `CoreSource`."""
        self._new_sinks.append(sink)
        self._wake_up()

    def unsubscribe(self, sink: Callable[[CoreEvent], None]) -> None:
        """Tell this one nothing more (but for what is being told now)."""
        with self._lock:
            self._sinks = [other for other in self._sinks if other != sink]

    def close(self, flush_s: float = 0.0) -> None:
        """End the core and the thread. The core has `flush_s` seconds to write what is cached to --kv-disk; a second
        call, from another thread, can shorten that."""
        self._flush_until = min(self._flush_until, time.monotonic() + flush_s)
        self._closing = True
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._traces.close()

    def hurry(self) -> None:
        """Have `close` wait no longer for the core."""
        self._flush_until = 0.0
        self._wake_up()

    def _wake_up(self) -> None:
        try:
            self._wake.send(b".")
        except OSError:
            pass  # the thread has ended

    def _run(self) -> None:
        try:
            while not self._closing and self._gone is None:
                end = self._run_core()
                if end is not None:
                    self._learn(end)
            while not self._closing:  # those who subscribe late are told, too
                self._listen(None, TICK_S)
        except Exception as error:
            log.exception("the supervisor failed")
            self._publish(CoreGone(EngineError(f"the supervisor failed: {type(error).__name__}: {error}")))
        finally:
            self._wake.close()
            self._woken.close()

    def _run_core(self) -> _End | None:
        """Start a core and follow it to its end; None when told to close."""
        try:
            self._core = _CoreProcess(self._module)
        except OSError as error:
            return _End(f"no engine process can be started ({error})", crashed=False)
        end = None
        try:
            end = self._watch(self._core)
            if end is None:
                self._stop(self._core)
            return end
        finally:
            core, self._core = self._core, None
            core.end()
            if end is not None:
                self._traces.crashed(core.memory[:], end.reason)

    def _watch(self, core: _CoreProcess) -> _End | None:
        """Follow a core to its end; None when told to close."""
        with contextlib.suppress(OSError):  # it has ended already: the connection shows that, too
            core.control.send(self._order)
        ticked_at = time.monotonic()
        while not self._closing:
            alive = self._listen(core, TICK_S)
            if not alive:
                return self._why_lost(core)
            now = time.monotonic()
            if now - ticked_at > 2 * TICK_S:
                core.excuse_silence()
            ticked_at = now
            stall = core.stall(self._policy)
            if stall is not None:
                return _End(f"the engine process {stall}", crashed=core.ticks_stopped == 0)
        return None

    def _stop(self, core: _CoreProcess) -> None:
        """Have the core write what is cached, if there is a file for it, and wait for its end."""
        flush_s = self._flush_until - time.monotonic()
        if self._config is None or not self._config.cache_config.num_disk_slots or not core.is_ready or flush_s <= 0:
            return
        with contextlib.suppress(OSError):  # it has ended already
            core.control.send(StopCore(flush_s=flush_s))
        while (left_s := self._flush_until + LAST_PAGES_S - time.monotonic()) > 0:
            if not self._listen(core, min(left_s, TICK_S)):
                return
        log.warning("the engine process is killed before it has written all cached KV pages")

    def _listen(self, core: _CoreProcess | None, timeout_s: float) -> bool:
        """Wait for news for a while. False when the core is gone."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if core is not None:
            poll.register(core.control, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(1000 * timeout_s)}
        if self._woken.fileno() in readable:
            self._woken.recv(4096)
            with contextlib.suppress(OSError):  # a core that cannot be reached any more: its end comes next
                self._welcome(core)
        if core is None or core.control.fileno() not in readable:
            return True
        try:
            for message, _ in core.control.receive():
                self._hear(core, message)
        except (EOFError, OSError, MalformedFrame):
            return False
        return True

    def _hear(self, core: _CoreProcess, message: object) -> None:
        core.heard_at = time.monotonic()
        match message:
            case Heartbeat():
                is_news = message.stage != core.heartbeat.stage
                core.beat(message)
                if is_news and not core.is_ready:
                    self._publish(CoreStarting(message.stage))
            case CoreConfigured():
                self._order = RestartCore(config=message.config, identity=None)
                self._config = message.config
                self._publish(message)
            case CoreReady():
                core.identity = message.identity
                if isinstance(self._order, RestartCore):
                    self._order = replace(self._order, identity=message.identity)
                self._has_worked = True
                self._budget.worked()
                for sink in self._sinks:
                    sink(CoreUp(core.attach(), message.identity))
            case CoreFailed():
                core.failure = message
            case TraceWanted():
                self._traces.quarantined(core.memory[:], message.reason)

    def _welcome(self, core: _CoreProcess | None) -> None:
        """Tell new subscribers how things stand."""
        while self._new_sinks:
            sink = self._new_sinks.popleft()
            with self._lock:
                self._sinks = [other for other in self._sinks if other != sink] + [sink]
            if self._config is not None:
                sink(CoreConfigured(config=self._config))
            if self._gone is not None:
                sink(self._gone)
            elif core is not None and core.identity is not None:
                sink(CoreUp(core.attach(), core.identity))
            elif core is not None and core.heartbeat.stage:
                sink(CoreStarting(core.heartbeat.stage))

    def _why_lost(self, core: _CoreProcess) -> _End:
        try:
            returncode = core.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return _End("the engine process closed its connection", crashed=True)
        if core.failure is not None:
            error = from_wire(core.failure.name, core.failure.fields)
            is_ours = core.failure.name in ("EngineError", "EngineDeadError")
            final = core.failure.starting and (not is_ours or not self._has_worked)
            return _End(error.message, crashed=True, error=error if final else None)
        if returncode == -signal.SIGKILL and num_oom_kills() > core.num_oom_kills:
            return _End("the engine process was killed for want of memory", crashed=True)
        reason, crashed = f"the engine process {describe_exit(returncode)}", returncode not in OUTSIDE_SIGNALS
        if not crashed or self._has_worked:
            return _End(reason, crashed)
        reason += f" in its first start (last heard of in stage {core.heartbeat.stage or 'process'!r})"
        return _End(reason, crashed, error=EngineError(reason))

    def _learn(self, end: _End) -> None:
        """Wait and return for another core, or give up."""
        if end.error is not None:
            self._publish(CoreGone(end.error))
            return
        pause_s = self._budget.spend()
        if pause_s is None:
            count = f"{counted(len(self._budget), 'restart')} in {self._policy.engine_restart_window} s"
            self._publish(CoreGone(EngineDeadError(f"{end.reason}, after {count} (--max-engine-restarts)")))
            return
        log.error("%s; restart %d in %.1f s", end.reason, len(self._budget), pause_s)
        self._publish(CoreDown(end.reason, end.crashed))
        until = time.monotonic() + pause_s
        while not self._closing and (left := until - time.monotonic()) > 0:
            self._listen(None, left)

    def _publish(self, event: CoreEvent) -> None:
        if isinstance(event, CoreGone):
            if self._has_worked:  # else whoever started it is told
                log.error("the engine is gone: %s", event.error)
            self._gone = event
        for sink in self._sinks:
            sink(event)
