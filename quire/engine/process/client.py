"""How a front talks to an EngineCore that steps by itself: in a thread of this process, or in another process."""

from __future__ import annotations

import asyncio
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, cast

from quire.engine.engine_core import EngineCore
from quire.engine.process.protocol import DATA, ActivityCall, ActivityResult, Trial, UtilityCall, UtilityResult
from quire.errors import EngineDeadError, EngineError
from quire.log import get_logger
from quire.messages.codec import FrameReader, MalformedFrame
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.stats import Activity
from quire.structured.grammar import Vocabulary
from quire.utils.threads import start_essential

log = get_logger(__name__)

OnOutputs = Callable[[EngineCoreOutputs], None]
OnDeath = Callable[[EngineDeadError], None]


class CoreClient(Protocol):
    """Sends requests and aborts; outputs come back through a callback."""

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request or a branch before the next step."""

    def call(self, method: str) -> Future[bytes]:
        """Call a method of the core between two steps; what it returns."""

    def activity(self, tenant: str) -> Future[Activity]:
        """What a tenant's requests do, as it is between two steps."""

    def close(self) -> None:
        """Stop the core; harmless when called again."""


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    done: Future[bytes]


@dataclass(frozen=True, slots=True)
class _ActivityCall:
    tenant: str
    done: Future[Activity]


Command = EngineCoreRequest | AbortRequest | _Call | _ActivityCall | None
"""For the thread of a core; None ends it."""


class ThreadedCoreClient:
    """A core that steps in a thread of this process. The thread alone touches the core, and calls back."""

    def __init__(
        self, core: EngineCore, on_outputs: OnOutputs, on_death: OnDeath, vocabulary: Callable[[], Vocabulary]
    ) -> None:
        """`vocabulary` is asked before the first request that has a grammar."""
        self._core = core
        self._vocabulary = vocabulary
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._graphs_are_missing = True
        """As far as is known: one is captured whenever there is nothing else to do."""
        self._thread = start_essential("quire-core", self._run)

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._commands.put(request)

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request or a branch before the next step."""
        self._commands.put(abort)

    def call(self, method: str) -> Future[bytes]:
        """Call a method of the core between two steps; what it returns."""
        call = _Call(method, Future())
        self._ask(call)
        return call.done

    def activity(self, tenant: str) -> Future[Activity]:
        """What a tenant's requests do, as it is between two steps."""
        call = _ActivityCall(tenant, Future())
        self._ask(call)
        return call.done

    def _ask(self, call: _Call | _ActivityCall) -> None:
        if self._thread.is_alive():
            self._commands.put(call)
        else:
            call.done.set_exception(EngineDeadError("the engine was closed"))

    def close(self) -> None:
        """Stop the thread and release the model."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                self._on_outputs(self._core.step())
                self._core.report()
        except Exception as error:
            log.exception("engine core died")
            self._on_death(EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}"))
        finally:
            self._core.close()

    def _obey(self) -> bool:
        """Carry out what has been asked; sleeps while there is nothing to do. False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._core.has_work() and not self._graphs_are_missing)
            except queue.Empty:
                if self._core.has_work():
                    return True
                self._graphs_are_missing = self._core.capture_graph()
                continue
            match command:
                case None:
                    return False
                case AbortRequest():
                    self._core.abort(command)
                case _ActivityCall():
                    command.done.set_result(self._core.activity(command.tenant))
                case _Call():
                    self._answer(command)
                case _:
                    if command.grammar is not None:
                        self._core.use_vocabulary(self._vocabulary())
                    self._core.add(command)

    def _answer(self, call: _Call) -> None:
        if not call.done.set_running_or_notify_cancel():
            return
        match call.method:
            case "reset_prefix_cache":
                self._core.reset_prefix_cache()
                call.done.set_result(b"")
            case "recording":
                call.done.set_result(self._core.recording())
            case "finished_requests":
                call.done.set_result(self._core.finished_requests())
            case _:
                call.done.set_exception(EngineError(f"the core has no method {call.method!r}"))


TURN_S = 0.005
"""So long a core's messages are handled without a break: many come at once after the event loop was busy."""


class ProcessCoreClient(asyncio.Protocol):
    """A connection to a core process; lives in one event loop, and calls back there.

    There is a new one for each core: what was asked of a core that is gone, its successor has never heard of.
    """

    def __init__(
        self,
        on_outputs: OnOutputs,
        on_trial: Callable[[str | None], None],
        on_lost: Callable[[], None],
        vocabulary: Callable[[], Vocabulary],
    ) -> None:
        """`vocabulary` is asked before the first request that has a grammar."""
        self._vocabulary = vocabulary
        self._knows_vocabulary = False
        """Whether the core has heard of it from this front."""
        self._on_outputs = on_outputs
        self._on_trial = on_trial
        self._on_lost = on_lost
        self._reader = FrameReader(DATA)
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()

    async def connect(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=connection)

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        if request.grammar is not None and not self._knows_vocabulary:
            self._knows_vocabulary = True
            self._send(self._vocabulary())
        self._send(request)

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request or a branch before the next step."""
        self._send(abort)

    def call(self, method: str) -> Future[bytes]:
        """Call a method of the core between two steps; what it returns."""
        call = UtilityCall(call_id=next(self._call_ids), method=method)
        done = self._calls[call.call_id] = Future()
        self._send(call)
        return done

    def activity(self, tenant: str) -> Future[Activity]:
        """What a tenant's requests do, as it is between two steps."""
        call = ActivityCall(call_id=next(self._call_ids), tenant=tenant)
        done = self._calls[call.call_id] = Future()
        self._send(call)
        return done

    def close(self) -> None:
        """Let go of the core; nothing is called back from here on."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        while self._calls:
            _, done = self._calls.popitem()
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineDeadError("the engine process ended before it could answer"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has taken the socket."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """The core has said something."""
        self._take(self._reader.feed(data))

    def _take(self, messages: Iterator[object]) -> None:
        """Handle messages for a while; the rest follows when the event loop has served others."""
        until = time.monotonic() + TURN_S
        try:
            for message in messages:
                if self._transport is None:
                    return  # closed by what came before
                match message:
                    case EngineCoreOutputs():
                        self._on_outputs(message)
                    case Trial():
                        self._on_trial(message.request_id)
                    case UtilityResult():
                        self._answer(message)
                    case ActivityResult():
                        self._calls.pop(message.call_id).set_result(message.activity)
                if time.monotonic() > until and self._transport is not None:
                    self._transport.pause_reading()
                    asyncio.get_running_loop().call_soon(self._take, messages)
                    return
            if self._transport is not None and not self._transport.is_reading():
                self._transport.resume_reading()
        except MalformedFrame:
            log.exception("the engine process sent what is no message")
            self.close()
            self._on_lost()

    def connection_lost(self, exc: Exception | None) -> None:
        """The core has gone, or has let go of this front."""
        if self._transport is not None:
            self.close()
            self._on_lost()

    def _answer(self, result: UtilityResult) -> None:
        done = self._calls.pop(result.call_id, None)
        if done is None or not done.set_running_or_notify_cancel():
            return  # whoever called has left
        if result.error is not None:
            done.set_exception(EngineError(result.error))
        else:
            done.set_result(result.data)

    def _send(self, message: object) -> None:
        if self._transport is not None:
            self._transport.write(DATA.encode(message))
