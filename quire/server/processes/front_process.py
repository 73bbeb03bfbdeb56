"""`python -m quire.server.processes.front_process`: one of several fronts, supervised by `front_group`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.errors import QuireError
from quire.server.processes.front import Front, run_front
from quire.server.processes.link import FrontFailed, FrontReady, ParentLink
from quire.server.processes.peers import LinkedPeers
from quire.utils.process import die_with_parent


def main() -> None:
    """Entry point: `front_process DESCRIPTOR PARENT_PID`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    descriptor, parent_pid = map(int, sys.argv[1:])
    die_with_parent(parent_pid)
    link = ParentLink(socket.socket(fileno=descriptor))
    orders, seat, sock, counts = link.orders()
    engine = AsyncLLMEngine(link, orders.limits, front=seat.generation, num_fronts=orders.settings.api_server_count)

    def handle_signals(front: Front, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGTERM, front.drain)
        link.on_finish = lambda at_once: _call(loop, front, at_once)

    try:
        run_front(
            engine,
            orders.settings,
            sock,
            on_ready=lambda: link.tell(FrontReady()),
            handle_signals=handle_signals,
            make_peers=lambda: LinkedPeers(link, counts),
            is_successor=seat.is_successor,
        )
    except QuireError as error:
        name, fields = error.as_wire()
        link.tell(FrontFailed(name=name, fields=fields))  # the parent says it, once
        link.flush()
        os._exit(2)
    os._exit(0)


def _call(loop: asyncio.AbstractEventLoop, front: Front, at_once: bool) -> None:
    loop.call_soon_threadsafe(front.stop if at_once else front.drain)


if __name__ == "__main__":
    main()
