"""The link of a front: whole messages from several threads, and a parent that waits for no front."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from quire import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.core_startup import create_config
from quire.engine.front.admission import AdmissionLimits
from quire.engine.identity import identity_of
from quire.engine.process.protocol import CoreConfigured
from quire.engine.process.supervisor import CoreStarting, CoreUp
from quire.observability.prometheus import Metrics
from quire.server.processes.front_group import FrontProcess
from quire.server.processes.link import Ask, FrontOrders, FrontReady, FrontReport, FrontSeat, Reports
from quire.server.processes.shared_counts import new_memory
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.utils.process import thread_states
from tests.server.conftest import Running

TIMEOUT = 60
LARGE = [FrontReport(samples={f"metric{n}": {("a_total", (("path", "x" * 1000),)): 1.0}}) for n in range(350)]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Parent:
    """A front process and what it says."""

    def __init__(self) -> None:
        settings = ServerSettings(port=0)
        memory = new_memory(1, 0)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            orders = FrontOrders(settings=settings, limits=AdmissionLimits())
            seat = FrontSeat(front=0, generation=0, is_successor=False)
            self.front = FrontProcess(orders, seat, listening, memory, lambda event: None)
        os.close(memory)
        self.heard: list[object] = []

    def hear_until(self, kind: type) -> None:
        """Receive until the front says this."""
        while not any(isinstance(message, kind) for message in self.heard):
            self.heard += [message for message, _ in self.front.link.receive()]
        self.heard.clear()


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.front.process.kill()
    assert "SIGKILL" in made.front.end()


def test_a_front_frozen_while_long_messages_are_sent_from_two_threads_loses_none(parent: Parent) -> None:
    front = parent.front
    overrides = {"padding": ["x" * 1000] * 350}
    config = create_config(EngineArgs(max_model_len=512, hf_overrides=overrides))
    front.hear(CoreConfigured(config=config))
    front.ask()
    parent.hear_until(FrontReport)
    front.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: not thread_states(front.process.pid).strip("T"))

    def supervise() -> None:
        for number in range(30):
            front.hear(CoreStarting(stage=f"stage {number}"))
            front.hear(CoreConfigured(config=config))
        front.hear(CoreUp(theirs, identity_of(config, weights="")))

    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=supervise)
    thread.start()
    for number in range(30):
        front.tell(Reports(call_id=number, reports=LARGE))
    thread.join(TIMEOUT)
    assert not thread.is_alive(), "neither thread waits for the front"
    assert front.link.num_unsent_bytes > 1 << 20
    assert front.process.poll() is None
    front.process.send_signal(signal.SIGCONT)
    parent.hear_until(FrontReady)  # the last message came, with its descriptor: the front has its core
    front.tell(Ask())
    parent.hear_until(FrontReport)
    assert front.process.poll() is None
    ours.close()


def test_a_front_that_lets_too_much_pile_up_is_killed_and_says_why(parent: Parent) -> None:
    front = parent.front
    front.process.send_signal(signal.SIGSTOP)
    for number in range(300):
        front.tell(Reports(call_id=number, reports=LARGE))
    front.process.wait(TIMEOUT)
    assert "bytes were not read" in front.fault


def test_metrics_are_made_once_whichever_threads_ask_first(server: Running) -> None:
    engine: AsyncLLMEngine = server.engine
    for _ in range(10):
        service = Service(engine, ServerSettings())
        barrier = threading.Barrier(8)
        made: list[Metrics] = []

        def ask(service: Service = service, barrier: threading.Barrier = barrier, made: list[Metrics] = made) -> None:
            barrier.wait()
            made.append(service.metrics)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert len(made) == 8
        assert len({id(metrics) for metrics in made}) == 1
