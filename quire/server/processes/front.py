"""One process that serves HTTP: an app on a listening socket, until it has drained."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.errors import QuireError, counted
from quire.log import adopt, get_logger
from quire.server.http.connection import LimitedConnection, connection_factory
from quire.server.processes.peers import Peers
from quire.server.settings import ServerSettings
from quire.utils import garbage

log = get_logger(__name__)

SWITCH_INTERVAL_S = 0.001
"""After so long a thread of the work pool hands the interpreter to the event loop; Python's 5 ms would be added to
every token of every stream while a large request is read."""
LAST_WORDS_S = 2
"""Time for the last words of requests that were aborted to reach their readers."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, since what a signal means is decided here, and without its ten ticks a
    second: an idle server sleeps. `connection` dates the replies."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def main_loop(self) -> None:
        """Wait for `exit`."""
        await self._exit.wait()

    @property
    def num_answering(self) -> int:
        """Connections that wait for a byte of an answer, whether it is still made or only not sent yet."""
        return sum(connection.is_answering for connection in self._connections)

    def release(self) -> None:
        """Close idle connections now, and the others with their answers; new ones are still accepted."""
        for connection in self._connections:
            connection.release()

    @property
    def _connections(self) -> list[LimitedConnection]:
        return cast(list[LimitedConnection], list(self.server_state.connections))

    def exit(self) -> None:
        """Close connections once their replies are sent, then end; harmless when called again."""
        self.should_exit = True
        self._exit.set()


class Front:
    """The HTTP server around one engine."""

    def __init__(self, engine: AsyncLLMEngine, settings: ServerSettings, sock: socket.socket) -> None:
        self.engine = engine
        self.settings = settings
        self.sock = sock
        self._server: HttpServer | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._exiting = False
        self._stop = asyncio.Event()
        self._drainer: asyncio.Task[None] | None = None
        self._deadline = 0.0
        """When draining ends."""
        self._failure: QuireError | None = None

    async def run(
        self, make_app: Callable[[], ASGIApp], on_ready: Callable[[], None], *, is_successor: bool = False
    ) -> None:
        """Serve until drained or stopped; a successor leaves connections to others until its engine is ready.

        Raises: ConfigError and its kin when the engine cannot start.
        """
        watcher = self._watcher = asyncio.create_task(self._watch_start(on_ready))
        if is_successor:
            await asyncio.wait({watcher})
        self._server = HttpServer(uvicorn_config(make_app(), self.settings))
        if self._exiting:
            self._server.exit()
        try:
            await self._server.serve([self.sock])
        finally:
            watcher.cancel()
            if self._drainer is not None:
                self._drainer.cancel()
            await self._close()
        if self._failure is not None:
            raise self._failure

    async def _close(self) -> None:
        """Close the engine. It has the rest of the time for draining to keep what is cached, less if told to stop."""
        left_s = max(0.0, self._deadline - time.monotonic())
        closing = asyncio.create_task(asyncio.to_thread(self.engine.close, left_s))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({closing, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not closing.done():
            await asyncio.to_thread(self.engine.close, 0.0)
        await closing

    def drain(self) -> None:
        """Refuse what is new, finish what is here, then end; harmless when called again."""
        if self._drainer is None:
            self.engine.drain()
            if self._server is not None:
                self._server.release()
            log.info(
                "draining %s and %s with an answer under way, for %d s at most",
                counted(self.engine.num_unfinished, "request"),
                counted(self._num_answering, "connection"),
                self._timeout_s,
            )
            self._drainer = asyncio.create_task(self._finish())

    def stop(self) -> None:
        """End now: requests end with what they have."""
        self.drain()
        self._stop.set()

    def on_signal(self) -> None:
        """The first signal drains, the second stops."""
        if self._drainer is None:
            self.drain()
        else:
            self.stop()

    @property
    def _timeout_s(self) -> int:
        return self.settings.shutdown_timeout

    @property
    def _num_answering(self) -> int:
        return 0 if self._server is None else self._server.num_answering

    async def _finish(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s
        while (self.engine.num_unfinished or self._num_answering) and time.monotonic() < self._deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.05)
                break
        if self.engine.num_unfinished:
            log.warning("aborting %s", counted(self.engine.num_unfinished, "request"))
            await self.engine.abort_all()
        elif self._num_answering:
            log.warning("cutting %s not read in time", counted(self._num_answering, "answer"))
        self._exit()

    def _exit(self) -> None:
        self._exiting = True
        if self._server is not None:
            self._server.exit()
        elif self._watcher is not None:
            self._watcher.cancel()

    async def _watch_start(self, on_ready: Callable[[], None]) -> None:
        try:
            await self.engine.wait_ready()
        except QuireError as error:
            self._failure = error
            self._exit()
        else:
            garbage.settle()
            on_ready()


def uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn as the settings want it."""
    return uvicorn.Config(
        app,
        http=connection_factory(settings),  # type: ignore[arg-type]
        ws="none",
        loop="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        root_path=settings.root_path.rstrip("/"),
        limit_concurrency=None,
        timeout_keep_alive=settings.idle_timeout,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def run_front(
    engine: AsyncLLMEngine,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    on_ready: Callable[[], None],
    handle_signals: Callable[[Front, asyncio.AbstractEventLoop], None],
    make_peers: Callable[[], Peers | None] = lambda: None,
    is_successor: bool = False,
) -> None:
    """Serve in the main thread until drained; `make_peers` is called in the event loop.

    Raises: ConfigError and its kin when the engine cannot start.
    """
    import uvloop

    from quire.server.app import create_app

    adopt("uvicorn", "asyncio", "opentelemetry")
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def main() -> None:
        front = Front(engine, settings, sock)
        handle_signals(front, asyncio.get_running_loop())
        await front.run(lambda: create_app(engine, settings, make_peers()), on_ready, is_successor=is_successor)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
