"""`serve`: from options to running processes.

With one front this process serves HTTP itself and supervises the core. With several it serves nothing: it supervises
the core and the fronts, which share one listening socket. No process but the core imports torch; all others end with
the first one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config.flags.args import EngineArgs
from quire.engine.front.admission import AdmissionLimits
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.supervisor import CoreSupervisor
from quire.log import configure, get_logger
from quire.server.settings import ServerSettings
from quire.utils.net import listen_tcp, listen_unix, url_of
from quire.utils.process import raise_descriptor_limit

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

log = get_logger(__name__)

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The first one drains, the second stops. SIGHUP: the terminal was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything `quire serve` was told."""

    args: EngineArgs
    settings: ServerSettings
    limits: AdmissionLimits
    policy: RestartPolicy


class EarlySignals:
    """Remembers a signal that comes before anybody can drain: an exception in the middle of an import may be lost."""

    def __init__(self) -> None:
        self.came = False
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self.numbers = [number for number in END_SIGNALS if number != signal.SIGHUP or not is_nohup]
        self.remember()

    def remember(self) -> None:
        """Take the signals: before others do, and again when they have finished."""
        for number in self.numbers:
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self.came = True


def serve(options: ServeOptions, started_at: float) -> None:
    """Serve until told to stop. `started_at` is when the process began, by `time.monotonic()`.

    Raises: ConfigError and its kin, before weights are read where possible.
    """
    settings = options.settings
    configure(settings.log_format, settings.log_level)
    for warning in settings.warnings:
        log.warning("%s", warning)
    early = EarlySignals()
    raise_descriptor_limit()
    with _listen(settings) as sock:
        url = url_of(sock, tls=settings.ssl_certfile is not None)

        def on_ready() -> None:
            log.info("serving on %s, ready in %.2f s%s", url, time.monotonic() - started_at, pages_of(url, settings))

        supervisor = CoreSupervisor(options.args, options.policy)  # loading overlaps with all that follows
        try:
            if settings.api_server_count == 1:
                _serve_here(options, supervisor, sock, on_ready, early)
            else:
                _serve_in_fronts(options, supervisor, sock, on_ready, early)
        finally:
            early.remember()  # one that comes now must not interrupt the end
            supervisor.close()
            if settings.uds is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(settings.uds)


def _serve_here(
    options: ServeOptions,
    supervisor: CoreSupervisor,
    sock: socket.socket,
    on_ready: Callable[[], None],
    early: EarlySignals,
) -> None:
    from quire.engine.async_llm_engine import AsyncLLMEngine
    from quire.server.processes.front import Front, run_front

    def handle_signals(front: Front, loop: AbstractEventLoop) -> None:
        for number in early.numbers:
            loop.add_signal_handler(number, front.on_signal)
        if early.came:
            front.drain()

    engine = AsyncLLMEngine(supervisor, options.limits)
    run_front(engine, options.settings, sock, on_ready=on_ready, handle_signals=handle_signals)


def _serve_in_fronts(
    options: ServeOptions,
    supervisor: CoreSupervisor,
    sock: socket.socket,
    on_ready: Callable[[], None],
    early: EarlySignals,
) -> None:
    from quire.server.processes.front_group import FrontGroup
    from quire.server.processes.link import FrontOrders

    num_fronts = options.settings.api_server_count
    limits = options.limits.divided(num_fronts)
    log.info(
        "%d fronts: each lets %d requests and %d prompt tokens wait; limits of requests in progress hold for all",
        num_fronts,
        limits.max_queued_requests,
        limits.max_queued_tokens,
    )
    orders = FrontOrders(settings=options.settings, limits=limits)
    group = FrontGroup(orders, sock, supervisor, options.policy, on_ready)
    group.handle_signals(early.numbers)
    if not early.came:
        group.run()
    for number in early.numbers:  # one more signal: do not wait for what is still to be written
        signal.signal(number, lambda *_: supervisor.hurry())
    supervisor.close(max(0.0, group.drain_until - time.monotonic()))


def pages_of(url: str, settings: ServerSettings) -> str:
    """What there is for a browser; nothing where no browser can connect."""
    if settings.uds is not None:
        return ""
    docs = "" if settings.disable_fastapi_docs else f", API docs: {url}/docs"
    return f"; console: {url}/{docs}"


def _listen(settings: ServerSettings) -> socket.socket:
    return listen_tcp(settings.host, settings.port) if settings.uds is None else listen_unix(settings.uds)
