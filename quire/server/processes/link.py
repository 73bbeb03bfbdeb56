"""What a parent process and its fronts say to each other, and the front's end of it.

The parent passes open descriptors along: the listening socket that all fronts share, and each front's own connection to
every new core.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.engine.front.admission import AdmissionLimits
from quire.engine.identity import Identity
from quire.engine.process.protocol import CoreConfigured
from quire.engine.process.supervisor import CoreDown, CoreEvent, CoreGone, CoreStarting, CoreUp
from quire.errors import from_wire
from quire.messages.codec import Codec
from quire.messages.framed_socket import FramedSocket
from quire.messages.stats import StepStats
from quire.observability.samples import Samples
from quire.server.processes.shared_counts import SharedCounts
from quire.server.settings import ServerSettings
from quire.utils.threads import start_essential


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOrders:
    """Parent -> front, first of all; comes with the listening socket."""

    settings: ServerSettings
    limits: AdmissionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSeat:
    """Parent -> front, next; comes with the memory of `SharedCounts`."""

    front: int
    """Which row of it is this front's."""
    generation: int
    """How many fronts the server had before this one."""
    is_successor: bool
    """Others serve already: it takes no connection before it can answer as well as they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConnected:
    """Parent -> front; comes with a connection to a core that is ready."""

    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFinished:
    """Parent -> front: there will be no core any more; the error as `QuireError.as_wire` writes it."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Parent -> front: drain, or stop at once."""

    at_once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """Front -> parent: the connection to the core is lost; if there is a core, give another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontReady:
    """Front -> parent: requests are served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontFailed:
    """Front -> parent, before it exits: it cannot serve, and another one could not either."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Front -> parent -> other fronts: say how you are."""

    call_id: int = 0
    """The asking front's, for the answer."""


@dataclass(slots=True, kw_only=True)
class FrontReport:
    """Front -> parent: what it has to do and what it has counted."""

    num_unfinished: int = 0
    num_queued: int = 0
    num_restarts: int = 0
    stats: StepStats | None = None
    """What it knows of the cores."""
    samples: Samples = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Parent -> front: what the others said."""

    call_id: int
    reports: list[FrontReport]


LINK = Codec(
    (
        FrontOrders,
        FrontSeat,
        CoreConfigured,
        CoreConnected,
        CoreDown,
        CoreFinished,
        Finish,
        Reconnect,
        FrontReady,
        FrontFailed,
        Ask,
        FrontReport,
        Reports,
        CoreStarting,
    ),
    with_descriptor=(FrontOrders, FrontSeat, CoreConnected),
)


class ParentLink:
    """A front's connection to its parent: where its cores come from (a `CoreSource`), and who tells it to end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = FramedSocket(sock, LINK)
        self._messages = self._socket.messages()
        self._sink: Callable[[CoreEvent], None] | None = None
        self.on_finish: Callable[[bool], None] = lambda at_once: os._exit(0)
        """Called from another thread with `Finish.at_once`."""
        self.on_ask: Callable[[], None] = lambda: self.tell(FrontReport())
        """Called from another thread when another front wants a `FrontReport`."""
        self.on_reports: Callable[[Reports], None] = lambda reports: None
        """Called from another thread with what the others have said."""

    def orders(self) -> tuple[FrontOrders, FrontSeat, socket.socket, SharedCounts]:
        """What the parent says first, the listening socket, and the counts that the fronts share."""
        orders, listening = next(self._messages)
        seat, memory = next(self._messages)
        assert isinstance(orders, FrontOrders), orders
        assert isinstance(seat, FrontSeat), seat
        settings = orders.settings
        counts = SharedCounts(settings.api_server_count, len(settings.api_key), front=seat.front, descriptor=memory)
        os.close(memory)
        return orders, seat, socket.socket(fileno=listening), counts

    def subscribe(self, sink: Callable[[CoreEvent], None]) -> None:
        """See `CoreSource`."""
        if self._sink is None:
            self._sink = sink
            start_essential("quire-parent", lambda: self._listen(sink))
        else:
            self.tell(Reconnect())

    def tell(self, message: Reconnect | FrontReady | FrontFailed | Ask | FrontReport) -> None:
        """Say something to the parent; from any thread, and never waits."""
        with contextlib.suppress(OSError):  # it is gone, and this process goes with it
            self._socket.send(message)

    def flush(self) -> None:
        """Wait until the parent has been told everything."""
        self._socket.flush()

    def close(self, flush_s: float = 0.0) -> None:
        """Nothing to let go: the core is the parent's."""

    def _listen(self, sink: Callable[[CoreEvent], None]) -> None:
        for message, descriptor in self._messages:
            match message:
                case CoreConnected():
                    sink(CoreUp(socket.socket(fileno=descriptor), message.identity))
                case CoreConfigured() | CoreStarting() | CoreDown():
                    sink(message)
                case CoreFinished():
                    sink(CoreGone(from_wire(message.name, message.fields)))
                case Finish():
                    self.on_finish(message.at_once)
                case Ask():
                    self.on_ask()
                case Reports():
                    self.on_reports(message)
        os._exit(1)  # without a parent nobody supervises the core
