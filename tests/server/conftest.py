"""A server over a real socket, the embedded model behind it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvloop

from quire.config.flags.args import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import EngineParts, start
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.server.app import create_app
from quire.server.processes.front import HttpServer, uvicorn_config
from quire.server.settings import ServerSettings

MODEL = "quire-tiny"
NUM_BLOCKS = 512
NUM_HEALTHY = 8
TIMEOUT = 60
"""Seconds after which a test that waits for what never comes is ended."""
MAKING = threading.Lock()
"""Held while an app is made: pydantic's building of types is not safe in threads."""
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")


class Running:
    """A server in the event loop of another thread."""

    def __init__(
        self,
        parts: EngineParts,
        engine: AsyncLLMEngine,
        settings: ServerSettings,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.parts = parts
        self.engine = engine
        self._loop = loop
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # so that slow readers are felt early
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        with MAKING:
            self.app = create_app(engine, settings)
            self._server = HttpServer(uvicorn_config(self.app, settings))
        self._done = asyncio.run_coroutine_threadsafe(self._server.serve([self._sock]), loop)
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT)

    def close(self) -> None:
        self.client.close()
        self._loop.call_soon_threadsafe(self._server.exit)
        self._done.result(TIMEOUT)
        self._sock.close()

    def keep_idle_connections(self, seconds: float) -> None:
        """For less time than an operator can choose."""
        self._server.config.timeout_keep_alive = seconds

    def connections(self) -> list[Any]:
        """Everything that counts as a connection now."""
        return list(self._server.server_state.connections)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and every block is free."""
        return self.engine.num_unfinished == 0 and self.parts.core.scheduler.blocks.pool.num_free == NUM_BLOCKS

    def wait_idle(self) -> None:
        wait_for(lambda: self.is_idle)


class StandIn:
    """An executor in front of another: its steps wait until they may go, and raise when they are told to."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.may_go = threading.Event()
        self.is_forgotten = False
        """A step was held until its time was up: the test waits for something that cannot come meanwhile."""
        self.error: Exception | None = None

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        self.is_forgotten = not self.may_go.wait(TIMEOUT)
        assert not self.is_forgotten
        if self.error is not None and plan.seq_ids:
            raise self.error
        return self.inner.execute(plan)

    def capture_graph(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


@contextmanager
def stand_in(server: Running) -> Iterator[StandIn]:
    """The server's executor behind one that holds its steps; let go at the end."""
    core = server.parts.core
    inner = core.executor
    held = core.executor = StandIn(inner)
    try:
        yield held
    finally:
        held.error = None
        held.may_go.set()
        core.executor = inner
    assert not held.is_forgotten


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The one event loop of all servers: an engine belongs to one."""
    made = uvloop.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(TIMEOUT)
    made.close()


@pytest.fixture(scope="session")
def engine_parts() -> Iterator[tuple[EngineParts, AsyncLLMEngine]]:
    parts = start(EngineArgs(num_gpu_blocks_override=NUM_BLOCKS, block_size=16, use_tqdm_on_load=False))
    with AsyncLLMEngine(parts) as engine:
        yield parts, engine


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings with a certificate for this machine."""
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    line = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj /CN=localhost"
    subprocess.run([*line.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def serve(engine_parts: tuple[EngineParts, AsyncLLMEngine], loop: asyncio.AbstractEventLoop) -> Serve:
    """settings -> a context in which a server with them runs, all over the same engine."""

    @contextmanager
    def run(**settings: Any) -> Iterator[Running]:
        processor = engine_parts[1].input_processor
        known = processor.thinking
        server = Running(*engine_parts, ServerSettings(**settings), loop)
        try:
            yield server
        finally:
            server.close()
            processor.thinking = known  # the engine is told of the server's format, and outlives it

    return run


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Running]:
    """A server with default settings."""
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def healthy_neighbours(server: Running) -> Iterator[None]:
    """Streams that run all the while, and must say the same as when nothing is wrong beside them."""
    given = {"prompt": "import os", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 1}
    stop = threading.Event()
    wrong: list[str] = []
    done = threading.Semaphore(0)

    def pieces(seed: int) -> str:
        # without trust_env: the environment, in which pytest writes the test's name, would be read in a thread
        with httpx.Client(timeout=TIMEOUT, trust_env=False) as client:
            reply = client.post(f"{server.url}/v1/completions", json={**given, "seed": seed})
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    def keep_asking(seed: int) -> None:
        while True:
            if pieces(seed) != alone[seed]:
                wrong.append(f"seed {seed}")
            done.release()
            if stop.is_set():
                return

    with ThreadPoolExecutor(NUM_HEALTHY) as pool:
        alone = list(pool.map(pieces, range(NUM_HEALTHY)))
    threads = [threading.Thread(target=keep_asking, args=(seed,)) for seed in range(NUM_HEALTHY)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert done.acquire(blocking=False)
    assert wrong == []
    server.wait_idle()
