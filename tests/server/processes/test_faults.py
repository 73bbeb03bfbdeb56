"""The fault matrix: eight fronts under load, a long config.json, and every process killed or stopped.

After each fault every stream that did not run through a killed front ends with the tokens of an undisturbed run, and
no process is left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

import quire
from tests.server.processes.test_processes import NUM_STREAMS, PROMPTS, TIMEOUT, Server, served, session_pids, wait_for

NUM_FRONTS = 8
NUM_TOKENS = 150
FRONTS = ("--api-server-count", str(NUM_FRONTS), "--max-engine-restarts", "1000", "--engine-restart-pause", "0")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def long_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a config.json of 350 KB."""
    directory = tmp_path_factory.mktemp("model") / "long"
    shutil.copytree(Path(quire.__file__).parent / "tiny", directory)
    config = json.loads((directory / "config.json").read_text())
    config["task_specific_params"] = {f"task {number}": "x" * 1000 for number in range(350)}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def start(server: Server, pool: ThreadPoolExecutor, num_tokens: int = NUM_TOKENS) -> list[Future[Any]]:
    """Streams of which each has begun, or has ended with an error."""
    begun = [Event() for _ in range(NUM_STREAMS)]
    streams = [
        pool.submit(server.complete, prompt, num_tokens, event, seed=index, temperature=index // len(PROMPTS) % 2)
        for index, (prompt, event) in enumerate(zip(itertools.cycle(PROMPTS), begun, strict=False))
    ]
    for event, stream in zip(begun, streams, strict=True):
        wait_for(lambda event=event, stream=stream: event.is_set() or stream.done())
    return streams


def undisturbed(server: Server, pool: ThreadPoolExecutor) -> list[Any]:
    results = [stream.result(TIMEOUT) for stream in start(server, pool)]
    assert {result[3] for result in results} == {"length"}
    return results


def check(streams: list[Future[Any]], expected: list[Any], *, num_killed_fronts: int = 0) -> int:
    """Every stream has its tokens, but for those whose connection ended with a front; how many these are."""
    num_cut = 0
    for stream, result in zip(streams, expected, strict=True):
        error = stream.exception(2 * TIMEOUT)
        if error is None:
            assert stream.result() == result
        else:
            assert isinstance(error, httpx.HTTPError), error
            num_cut += 1
    assert num_cut == 0 or num_killed_fronts
    return num_cut


def until_whole(server: Server) -> None:
    """All fronts are there and the server is ready."""
    wait_for(lambda: len(server.pids("front_process")) == NUM_FRONTS)
    wait_for(lambda: server.status("/ready") == 200)


def end(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(TIMEOUT) == 0


@contextmanager
def load(directory: Path, *flags: str) -> Iterator[tuple[Server, ThreadPoolExecutor, list[Any]]]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(directory, *flags) as server:
        yield server, pool, undisturbed(server, pool)
        end(server)


def test_a_core_killed_and_stopped_again_and_again_costs_no_token(tmp_path: Path, long_config: Path) -> None:
    rng = random.Random(1)
    with load(tmp_path, str(long_config), *FRONTS) as (server, pool, expected):
        for number in (signal.SIGKILL, signal.SIGSTOP) * 3:
            streams = start(server, pool)
            time.sleep(rng.uniform(0, 0.2))
            core = server.core_pid
            os.kill(core, number)
            wait_for(lambda: "(stage: " in server.client.get("/ready").text)
            assert server.status("/health") == 200
            check(streams, expected)
            wait_for(lambda core=core: server.pids("core_process") not in ([], [core]))
            until_whole(server)
        assert len(server.pids("front_process")) == NUM_FRONTS, "no front was replaced"
        assert "a front process" not in server.log.read_text()


def test_fronts_that_stop_for_a_while_lose_nothing(tmp_path: Path, long_config: Path) -> None:
    with load(tmp_path, str(long_config), *FRONTS) as (server, pool, expected):
        fronts = server.pids("front_process")
        streams = start(server, pool)
        for pid in fronts[:4]:
            os.kill(pid, signal.SIGSTOP)
        os.kill(server.core_pid, signal.SIGKILL)  # the stopped ones are told of a new core
        time.sleep(8)
        for pid in fronts[:4]:
            os.kill(pid, signal.SIGCONT)
        check(streams, expected)
        assert server.pids("front_process") == fronts
        assert server.client.get("/metrics").status_code == 200


def test_a_front_that_stays_stopped_is_replaced_after_its_timeout(tmp_path: Path, long_config: Path) -> None:
    with load(tmp_path, str(long_config), *FRONTS, "--front-timeout", "3") as (server, pool, expected):
        stopped = server.pids("front_process")[0]
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: "it has not answered for 3 s" in server.log.read_text())
        assert stopped not in server.pids("front_process")
        until_whole(server)
        check(start(server, pool), expected)


def test_fronts_killed_under_load_cost_their_own_connections_only(tmp_path: Path, long_config: Path) -> None:
    with load(tmp_path, str(long_config), *FRONTS) as (server, pool, expected):
        core = server.core_pid
        for pid in server.pids("front_process")[:3]:
            streams = start(server, pool)
            os.kill(pid, signal.SIGKILL)
            assert check(streams, expected, num_killed_fronts=1) < NUM_STREAMS
            until_whole(server)
        assert server.core_pid == core
        check(start(server, pool), expected)


def test_all_fronts_may_be_killed_at_once(tmp_path: Path) -> None:
    with load(tmp_path, "--api-server-count", str(NUM_FRONTS)) as (server, pool, expected):
        fronts = server.pids("front_process")
        for pid in fronts:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not set(fronts) & set(server.pids("front_process")))
        wait_for(lambda: len(server.pids("front_process")) == NUM_FRONTS)
        check(start(server, pool), expected)


def test_fronts_killed_while_a_new_core_connects_cost_their_own_connections_only(
    tmp_path: Path, long_config: Path
) -> None:
    rng = random.Random(2)
    with load(tmp_path, str(long_config), *FRONTS) as (server, pool, expected):
        for _ in range(3):
            streams = start(server, pool)
            core = server.core_pid
            victims = rng.sample(server.pids("front_process"), 2)
            os.kill(core, signal.SIGKILL)
            os.kill(victims[0], signal.SIGKILL)  # its successor and the new core start together
            wait_for(lambda core=core: server.pids("core_process") not in ([], [core]))
            time.sleep(rng.uniform(0.5, 2))
            os.kill(victims[1], signal.SIGKILL)
            assert check(streams, expected, num_killed_fronts=2) < NUM_STREAMS
            until_whole(server)
        check(start(server, pool), expected)


def test_everything_at_once(tmp_path: Path, long_config: Path) -> None:
    rng = random.Random(3)
    with load(tmp_path, str(long_config), *FRONTS) as (server, pool, expected):
        for _ in range(4):
            streams = start(server, pool)
            for _ in range(4):
                kind, number = rng.choice(
                    [
                        ("core_process", signal.SIGKILL),
                        ("core_process", signal.SIGSTOP),
                        ("front_process", signal.SIGKILL),
                    ]
                )
                pids = server.pids(kind)
                if pids:
                    os.kill(rng.choice(pids), number)
                time.sleep(rng.uniform(0, 1))
            check(streams, expected, num_killed_fronts=4)
            until_whole(server)
        check(start(server, pool), expected)


@pytest.mark.parametrize("num_fronts", [1, 2])
def test_a_log_on_a_full_disk_costs_the_log_only(tmp_path: Path, num_fronts: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--port", str(port), "--kv-cache-memory-bytes", "64M", "--max-model-len", "1024", "--enable-log-requests")
    server = Server.__new__(Server)
    with Path("/dev/full").open("wb") as full, ThreadPoolExecutor(NUM_STREAMS) as pool:
        server.process = subprocess.Popen(
            [sys.executable, "-m", "quire.cli.main", "serve", *flags, "--api-server-count", str(num_fronts)],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            start_new_session=True,
        )
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        server.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT, limits=limits)
        try:
            wait_for(lambda: is_ready(server))
            expected = undisturbed(server, pool)
            streams = start(server, pool)
            os.kill(server.core_pid, signal.SIGKILL)
            check(streams, expected)
            assert server.complete("x", 0)[0] == 400
            if num_fronts > 1:
                front = server.pids("front_process")[0]
                os.kill(front, signal.SIGKILL)
                wait_for(lambda: len(server.pids("front_process")) == num_fronts)
                wait_for(lambda: is_ready(server))
            check(start(server, pool), expected)
            end(server)
            wait_for(lambda: not session_pids(server.process.pid))
        finally:
            server.close()


def is_ready(server: Server) -> bool:
    assert server.process.poll() is None
    try:
        return server.status("/ready") == 200
    except httpx.HTTPError:
        return False
