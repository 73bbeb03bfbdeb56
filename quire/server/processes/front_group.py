"""Several fronts on one listening socket, and the parent that replaces those which end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from quire.engine.process.protocol import CoreConfigured
from quire.engine.process.restart_policy import RestartBudget, RestartPolicy
from quire.engine.process.supervisor import CoreDown, CoreEvent, CoreGone, CoreStarting, CoreSupervisor, CoreUp
from quire.errors import EngineDeadError, QuireError, counted, from_wire
from quire.log import get_logger
from quire.messages.codec import MalformedFrame
from quire.messages.framed_socket import FramedSocket
from quire.observability.samples import add_samples
from quire.server.processes.link import (
    LINK,
    Ask,
    CoreConnected,
    CoreFinished,
    Finish,
    FrontFailed,
    FrontOrders,
    FrontReady,
    FrontReport,
    FrontSeat,
    Reconnect,
    Reports,
)
from quire.server.processes.shared_counts import SharedCounts, new_memory
from quire.utils.process import describe_exit

log = get_logger(__name__)

FRONT_MODULE = "quire.server.processes.front_process"
GRACE_S = 5.0
"""Beyond its own deadline a front gets this long before it is killed."""
EXIT_TIMEOUT_S = 1.0
"""A front that has closed its link gets this long to exit."""
ANSWER_TIMEOUT_S = 1.0
"""A front that has not said by then how it is may be stopped."""
ASK_INTERVAL_S = 10.0
"""Seconds between questions to a front that nobody else asks: one that never answers is replaced."""


class Ending(IntEnum):
    """How far the end has come."""

    NOT_YET = 0
    DRAIN = 1
    STOP = 2


class FrontProcess:
    """One front, as its parent sees it. The parent never waits for it: what it does not read is queued."""

    def __init__(
        self,
        orders: FrontOrders,
        seat: FrontSeat,
        listening: socket.socket,
        memory: int,
        on_event: Callable[[CoreEvent], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        self.link = FramedSocket(ours, LINK)
        with theirs:
            command = [sys.executable, "-m", FRONT_MODULE, str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which has the fronts drain
            )
        self._on_event = on_event
        self.seat = seat
        self.is_ready = False
        self.failure: QuireError | None = None
        """Why it cannot serve, and no other in its place."""
        self.report = FrontReport()
        """What it said last."""
        self.asked_at: float | None = None
        """Since when it has yet to answer."""
        self.fault = ""
        """Why it was killed, if it was."""
        self.tell(orders, listening.fileno())
        self.tell(seat, memory)

    def ask(self) -> None:
        """Ask for a report, unless the last one is still to come."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            self.tell(Ask())

    def hear(self, event: CoreEvent) -> None:
        """Pass on what the supervisor says; in its thread."""
        self._on_event(event)
        match event:
            case CoreUp():
                with event.connection:
                    self.tell(CoreConnected(identity=event.identity), event.connection.fileno())
            case CoreConfigured() | CoreStarting() | CoreDown():
                self.tell(event)
            case CoreGone():
                name, fields = event.error.as_wire()
                self.tell(CoreFinished(name=name, fields=fields))

    def tell(self, message: object, descriptor: int = -1) -> None:
        """Say something, from any thread; a front that has let too much pile up is killed."""
        try:
            self.link.send(message, descriptor)
        except OSError as error:
            self.kill(f"{type(error).__name__}: {error}")

    def kill(self, fault: str) -> None:
        """Have it end; its link shows when it has."""
        if self.process.poll() is None:
            self.fault = self.fault or fault
            self.process.kill()

    def end(self) -> str:
        """Reap, with force if need be; how it ended."""
        self.link.close()
        try:
            returncode = self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill("its link was closed")
            returncode = self.process.wait()
        return describe_exit(returncode) + (f" ({self.fault})" if self.fault else "")


@dataclass(slots=True)
class _Question:
    """One front's question to all others."""

    asker: FrontProcess
    call_id: int
    awaited: list[FrontProcess]
    deadline: float


class FrontGroup:
    """Runs in the parent's main thread; serves nothing itself."""

    def __init__(
        self,
        orders: FrontOrders,
        listening: socket.socket,
        supervisor: CoreSupervisor,
        policy: RestartPolicy,
        on_ready: Callable[[], None],
    ) -> None:
        self._orders = orders
        self._listening = listening
        settings = orders.settings
        self._memory = new_memory(settings.api_server_count, len(settings.api_key))
        self._counts = SharedCounts(settings.api_server_count, len(settings.api_key), descriptor=self._memory)
        self._questions: list[_Question] = []
        self._ended = FrontReport()
        """What fronts had counted that have ended, as far as they were asked."""
        self._supervisor = supervisor
        self._policy = policy
        self._budgets = [RestartBudget(policy) for _ in range(settings.api_server_count)]
        """By seat: many fronts may be replaced more often than one."""
        self._on_ready: Callable[[], None] | None = on_ready
        self._fronts: dict[int, FrontProcess] = {}
        """By the descriptor of their link."""
        self._num_spawned = 0
        self._spawn_at: list[float] = []
        self._ask_at = time.monotonic() + ASK_INTERVAL_S
        self._wake, self._woken = socket.socketpair()
        self._num_signals = 0
        self._deadline: float | None = None
        """When those that have not finished are killed."""
        self.drain_until = 0.0
        """When draining ends."""
        self._ending = Ending.NOT_YET
        self._core_was_up = False
        self._failure: QuireError | None = None

    def handle_signals(self, numbers: Iterable[signal.Signals]) -> None:
        """Take these signals from now on: the first one drains, the second stops."""
        for number in numbers:
            signal.signal(number, self._on_signal)

    def run(self) -> None:
        """Serve until a signal ends it.

        Raises: ConfigError and its kin when the engine cannot start; EngineDeadError when fronts end again and again.
        """
        try:
            for _ in range(self._orders.settings.api_server_count):
                self._spawn()
            while self._fronts or self._spawn_at:
                self._wait()
                self._end_if_asked()
        finally:
            for front in self._fronts.values():
                front.process.kill()
                front.end()
        if self._failure is not None:
            raise self._failure

    def _spawn(self) -> None:
        taken = {front.seat.front for front in self._fronts.values()}
        free = set(range(self._orders.settings.api_server_count)) - taken
        seat = FrontSeat(front=min(free), generation=self._num_spawned, is_successor=self._on_ready is None)
        self._num_spawned += 1
        front = FrontProcess(self._orders, seat, self._listening, self._memory, self._on_core_event)
        self._fronts[front.link.fileno()] = front
        self._supervisor.subscribe(front.hear)

    def _on_core_event(self, event: CoreEvent) -> None:
        """In the supervisor's thread."""
        if isinstance(event, CoreUp):
            self._core_was_up = True
        elif isinstance(event, CoreGone) and not self._core_was_up:
            self._failure = event.error
            self._wake.send(b".")

    def _on_signal(self, number: int, frame: object) -> None:
        self._num_signals += 1
        self._wake.send(b".")

    def _wait(self) -> None:
        """Sleep until something happens, and take it in."""
        moments = [self._ask_at, *self._spawn_at, *(question.deadline for question in self._questions)]
        if self._deadline is not None:
            moments.append(self._deadline)
        awake_at = max(min(moments), time.monotonic())
        poll = select.poll()
        for descriptor in [self._woken.fileno(), *self._fronts]:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(max(0.0, awake_at - time.monotonic()) * 1000 + 1):
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)
            else:
                self._listen(self._fronts[descriptor])
        self._check_fronts(late_s=max(0.0, time.monotonic() - awake_at))
        now = time.monotonic()
        due = [moment for moment in self._spawn_at if moment <= now]
        self._spawn_at = [moment for moment in self._spawn_at if moment > now]
        for _ in due:
            self._spawn()
        for question in [q for q in self._questions if not q.awaited or q.deadline <= now]:
            self._answer(question)

    def _listen(self, front: FrontProcess) -> None:
        try:
            for message, _ in front.link.receive():
                if isinstance(message, FrontReady):
                    front.is_ready = True
                    self._budgets[front.seat.front].worked()
                    self._report_ready()
                elif isinstance(message, Reconnect):
                    self._supervisor.subscribe(front.hear)
                elif isinstance(message, FrontFailed):
                    front.failure = from_wire(message.name, message.fields)
                elif isinstance(message, Ask):
                    self._ask_others(front, message.call_id)
                elif isinstance(message, FrontReport):
                    front.report, front.asked_at = message, None
                    self._no_longer_await(front)
        except (EOFError, OSError, MalformedFrame):
            self._replace(front)

    def _check_fronts(self, late_s: float) -> None:
        """Ask those whom nobody has asked lately, and kill those that never answer.

        `late_s`: so long did this process itself not run, which is no fault of the fronts.
        """
        now = time.monotonic()
        policy = self._policy
        for front in self._fronts.values():
            limit_s = policy.front_timeout if front.is_ready else policy.startup_timeout
            if front.asked_at is None:
                continue
            front.asked_at += late_s
            if now - front.asked_at > limit_s and not front.fault:
                front.kill(f"it has not answered for {limit_s} s")
        if now >= self._ask_at:
            self._ask_at = now + ASK_INTERVAL_S
            for front in self._fronts.values():
                front.ask()

    def _ask_others(self, asker: FrontProcess, call_id: int) -> None:
        """Those that do not answer in time are answered for with what they said last."""
        others = [front for front in self._fronts.values() if front is not asker and front.is_ready]
        for front in others:
            front.ask()
        self._questions.append(_Question(asker, call_id, others, time.monotonic() + ANSWER_TIMEOUT_S))

    def _no_longer_await(self, front: FrontProcess) -> None:
        for question in self._questions:
            if front in question.awaited:
                question.awaited.remove(front)

    def _answer(self, question: _Question) -> None:
        self._questions.remove(question)
        others = [front.report for front in self._fronts.values() if front is not question.asker]
        question.asker.tell(Reports(call_id=question.call_id, reports=[*others, self._ended]))

    def _report_ready(self) -> None:
        if self._on_ready is not None and all(front.is_ready for front in self._fronts.values()):
            self._on_ready()
            self._on_ready = None

    def _replace(self, front: FrontProcess) -> None:
        """A front has ended: start another one, unless all shall end."""
        del self._fronts[front.link.fileno()]
        self._supervisor.unsubscribe(front.hear)
        how = front.end()
        self._counts.forget(front.seat.front)
        self._no_longer_await(front)
        self._questions = [question for question in self._questions if question.asker is not front]
        add_samples(self._ended.samples, front.report.samples)
        if self._ending or self._failure is not None:
            return
        if front.failure is not None:
            self._do_without(front.failure)
            return
        budget = self._budgets[front.seat.front]
        pause_s = budget.spend()
        if pause_s is None:
            self._failure = EngineDeadError(
                f"a front process {how}, after {counted(len(budget), 'restart')}; giving up"
            )
            return
        log.error("a front process %s; another one in %.1f s", how, pause_s)
        self._spawn_at.append(time.monotonic() + pause_s)

    def _do_without(self, error: QuireError) -> None:
        """A front could not begin to serve, nor could another: the others go on, if the server was ready with them."""
        if self._on_ready is not None or not (self._fronts or self._spawn_at):
            self._failure = error
            return
        log.error("a front process cannot be replaced, %d are left: %s", len(self._fronts), error.message)

    def _end_if_asked(self) -> None:
        """The first signal drains; the second, or a failure, stops; who is late is killed."""
        ending = Ending.STOP if self._num_signals > 1 or self._failure else Ending(self._num_signals)
        if ending > self._ending:
            self._ending = ending
            self._spawn_at = []
            timeout_s = self._orders.settings.shutdown_timeout if ending is Ending.DRAIN else 0
            self.drain_until = time.monotonic() + timeout_s
            self._deadline = self.drain_until + GRACE_S
            for front in self._fronts.values():
                front.tell(Finish(at_once=ending is Ending.STOP))
        if self._deadline is not None and time.monotonic() > self._deadline:
            for front in self._fronts.values():
                front.process.kill()
