"""Several fronts on one listening socket, and the parent that replaces those which end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from enum import IntEnum

from quire.engine.core_protocol import CoreConfigured
from quire.engine.core_supervisor import CoreDown, CoreEvent, CoreGone, CoreSupervisor, CoreUp
from quire.engine.restart_policy import RestartBudget
from quire.errors import EngineDeadError, QuireError
from quire.log import get_logger
from quire.messages.codec import FrameReader, MalformedFrame
from quire.server.link import LINK, CoreConnected, CoreFinished, Finish, FrontOrders, FrontReady, Reconnect, send
from quire.utils.process import describe_exit

log = get_logger(__name__)

GRACE_S = 5.0
"""Beyond its own deadline a front gets this long before it is killed."""
SEND_TIMEOUT_S = 1.0


class Ending(IntEnum):
    """How far the end has come."""

    NOT_YET = 0
    DRAIN = 1
    STOP = 2


class FrontProcess:
    """One front, as its parent sees it."""

    def __init__(self, orders: FrontOrders, listening: socket.socket, on_event: Callable[[CoreEvent], None]) -> None:
        self.link, theirs = socket.socketpair()
        self.link.settimeout(SEND_TIMEOUT_S)
        with theirs:
            command = [sys.executable, "-m", "quire.server.front_process", str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which has the fronts drain
            )
        self._on_event = on_event
        self.reader = FrameReader(LINK)
        self.is_ready = False
        self.tell(orders, listening.fileno())

    def hear(self, event: CoreEvent) -> None:
        """Pass on what the supervisor says; in its thread."""
        self._on_event(event)
        match event:
            case CoreUp():
                with event.connection:
                    self.tell(CoreConnected(), event.connection.fileno())
            case CoreConfigured() | CoreDown():
                self.tell(event)
            case CoreGone():
                name, fields = event.error.as_wire()
                self.tell(CoreFinished(name=name, fields=fields))

    def tell(self, message: object, *descriptors: int) -> None:
        """Say something; a front that does not listen is ended."""
        try:
            send(self.link, message, *descriptors)
        except OSError:
            self.process.kill()

    def end(self) -> str:
        """Reap, with force if need be; how it ended."""
        self.link.close()
        try:
            returncode = self.process.wait(SEND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            returncode = self.process.wait()
        return describe_exit(returncode)


class FrontGroup:
    """Runs in the parent's main thread; serves nothing itself."""

    def __init__(
        self,
        orders: FrontOrders,
        listening: socket.socket,
        supervisor: CoreSupervisor,
        budget: RestartBudget,
        on_ready: Callable[[], None],
    ) -> None:
        self._orders = orders
        self._listening = listening
        self._supervisor = supervisor
        self._budget = budget
        self._on_ready: Callable[[], None] | None = on_ready
        self._fronts: dict[int, FrontProcess] = {}
        """By the descriptor of their link."""
        self._spawn_at: list[float] = []
        self._wake, self._woken = socket.socketpair()
        self._num_signals = 0
        self._deadline: float | None = None
        """When those that have not finished are killed."""
        self._ending = Ending.NOT_YET
        self._core_was_up = False
        self._failure: QuireError | None = None

    def run(self) -> None:
        """Serve until a signal ends it.

        Raises: ConfigError and its kin when the engine cannot start; EngineDeadError when fronts end again and again.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
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
        front = FrontProcess(self._orders, self._listening, self._on_core_event)
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
        now = time.monotonic()
        moments = [*self._spawn_at, *([] if self._deadline is None else [self._deadline])]
        poll = select.poll()
        for descriptor in [self._woken.fileno(), *self._fronts]:
            poll.register(descriptor, select.POLLIN)
        timeout_ms = max(0.0, min(moments) - now) * 1000 + 1 if moments else None
        for descriptor, _ in poll.poll(timeout_ms):
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)
            else:
                self._listen(self._fronts[descriptor])
        now = time.monotonic()
        due = [moment for moment in self._spawn_at if moment <= now]
        self._spawn_at = [moment for moment in self._spawn_at if moment > now]
        for _ in due:
            self._spawn()

    def _listen(self, front: FrontProcess) -> None:
        try:
            data = front.link.recv(1 << 16)
            for message in front.reader.feed(data):
                if isinstance(message, FrontReady):
                    front.is_ready = True
                    self._report_ready()
                elif isinstance(message, Reconnect):
                    self._supervisor.subscribe(front.hear)
        except (OSError, MalformedFrame):
            data = b""
        if not data:
            self._replace(front)

    def _report_ready(self) -> None:
        if self._on_ready is not None and all(front.is_ready for front in self._fronts.values()):
            self._on_ready()
            self._on_ready = None

    def _replace(self, front: FrontProcess) -> None:
        """A front has ended: start another one, unless all shall end."""
        del self._fronts[front.link.fileno()]
        self._supervisor.unsubscribe(front.hear)
        how = front.end()
        if self._ending or self._failure is not None:
            return
        pause_s = self._budget.spend()
        if pause_s is None:
            self._failure = EngineDeadError(f"a front process {how}, after {len(self._budget)} restarts; giving up")
            return
        log.error("a front process %s; another one in %.1f s", how, pause_s)
        self._spawn_at.append(time.monotonic() + pause_s)

    def _end_if_asked(self) -> None:
        """The first signal drains; the second, or a failure, stops; who is late is killed."""
        ending = Ending.STOP if self._num_signals > 1 or self._failure else Ending(self._num_signals)
        if ending > self._ending:
            self._ending = ending
            self._spawn_at = []
            timeout_s = self._orders.settings.shutdown_timeout if ending is Ending.DRAIN else 0
            self._deadline = time.monotonic() + timeout_s + GRACE_S
            for front in self._fronts.values():
                front.tell(Finish(at_once=ending is Ending.STOP))
        if self._deadline is not None and time.monotonic() > self._deadline:
            for front in self._fronts.values():
                front.process.kill()
