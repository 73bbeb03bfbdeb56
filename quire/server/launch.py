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
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.args import EngineArgs
from quire.engine.admission import AdmissionLimits
from quire.engine.core_supervisor import CoreSupervisor
from quire.engine.restart_policy import RestartBudget, RestartPolicy
from quire.log import get_logger
from quire.server.settings import ServerSettings
from quire.utils.net import listen_tcp, listen_unix, url_of
from quire.utils.process import raise_descriptor_limit

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything `quire serve` was told."""

    args: EngineArgs
    settings: ServerSettings
    limits: AdmissionLimits
    policy: RestartPolicy


def serve(options: ServeOptions, started_at: float) -> None:
    """Serve until told to stop. `started_at` is when the process began, by `time.monotonic()`.

    Raises: ConfigError and its kin, before weights are read where possible.
    """
    settings = options.settings
    for warning in settings.warnings:
        log.warning("%s", warning)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until somebody can drain there is nothing to drain
    raise_descriptor_limit()
    with _listen(settings) as sock:
        url = url_of(sock, tls=settings.ssl_certfile is not None)

        def on_ready() -> None:
            log.info("serving on %s, ready in %.2f s", url, time.monotonic() - started_at)

        supervisor = CoreSupervisor(options.args, options.policy)  # loading overlaps with all that follows
        try:
            if settings.api_server_count == 1:
                _serve_here(options, supervisor, sock, on_ready)
            else:
                _serve_in_fronts(options, supervisor, sock, on_ready)
        finally:
            supervisor.close()
            if settings.uds is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(settings.uds)


def _serve_here(
    options: ServeOptions, supervisor: CoreSupervisor, sock: socket.socket, on_ready: Callable[[], None]
) -> None:
    from quire.engine.async_llm_engine import AsyncLLMEngine
    from quire.server.front import drain_then_stop, run_front

    engine = AsyncLLMEngine(supervisor, options.limits)
    run_front(engine, options.settings, sock, on_ready=on_ready, handle_signals=drain_then_stop)


def _serve_in_fronts(
    options: ServeOptions, supervisor: CoreSupervisor, sock: socket.socket, on_ready: Callable[[], None]
) -> None:
    from quire.server.front_group import FrontGroup
    from quire.server.link import FrontOrders

    orders = FrontOrders(settings=options.settings, limits=options.limits)
    FrontGroup(orders, sock, supervisor, RestartBudget(options.policy), on_ready).run()


def _listen(settings: ServerSettings) -> socket.socket:
    return listen_tcp(settings.host, settings.port) if settings.uds is None else listen_unix(settings.uds)
