"""`quire serve` as an operator meets it: real processes, real sockets, real signals."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

TIMEOUT = 60
FLAGS = ("--kv-cache-memory-bytes", "64M", "--max-model-len", "1024")


def session_pids(session_id: int) -> list[int]:
    """Live processes of a session; any may end while they are read."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session_id and fields[0] != "Z":
            found.append(int(process.name))
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def wait_for(condition: Callable[[], Any], seconds: float = TIMEOUT) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return result


def shared_files(temporary: Path) -> set[str]:
    """Files outside a server's own directories that it may have forgotten; other tests run beside this one."""
    return {str(file) for place in (Path("/dev/shm"), temporary) for file in place.glob("*quire*")}


class Server:
    """One `quire serve` in a session of its own."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        self.temporary = log.parent / "tmp"
        self.temporary.mkdir(exist_ok=True)
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "quire.cli.main",
                    "serve",
                    "--port",
                    "0",
                    *FLAGS,
                    "--trace-dir",
                    str(log.parent),
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )
        self.url = ""
        self.client = httpx.Client()

    def wait_ready(self, seconds: float = TIMEOUT) -> None:
        def url() -> Any:
            assert self.process.poll() is None, self.log.read_text()
            return re.search(r"serving on (\S+),", self.log.read_text())

        self.url = wait_for(url, seconds).group(1)
        self.client.close()
        self.client = httpx.Client(
            base_url=self.url, timeout=TIMEOUT, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )

    def pids(self, kind: str) -> list[int]:
        """Processes of this server: core_process or front_process."""
        return [pid for pid in session_pids(self.process.pid) if f"{kind} " in command_of(pid)]

    @property
    def core_pid(self) -> int:
        (pid,) = wait_for(lambda: self.pids("core_process"))
        return int(pid)

    def status(self, path: str) -> int:
        return self.client.get(path).status_code

    def complete(self, prompt: str, max_tokens: int, started: Event | None = None, **fields: Any) -> Any:
        """A streamed completion, joined: (text, tokens, logprobs, finish reason); `started` is set with the first."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "logprobs": 1, "ignore_eos": True, **fields}
        text, finish = "", None
        tokens: list[str] = []
        logprobs: list[float] = []
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return response.status_code, json.loads(response.read())
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return text, tokens, logprobs, event["error"]["code"]
                if started is not None:
                    started.set()
                for choice in event["choices"]:
                    text += choice["text"]
                    tokens += choice["logprobs"]["tokens"]
                    logprobs += choice["logprobs"]["token_logprobs"]
                    finish = choice["finish_reason"] or finish
        return text, tokens, logprobs, finish

    def assert_gone(self) -> None:
        """No process of this server is left."""
        wait_for(lambda: not session_pids(self.process.pid))

    def close(self) -> None:
        self.client.close()
        for pid in session_pids(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def served(directory: Path, *flags: str) -> Iterator[Server]:
    before = shared_files(directory / "tmp")
    server = Server(directory / "log", *flags)
    try:
        server.wait_ready()
        yield server
        server.assert_gone()
        assert shared_files(server.temporary) == before
    finally:
        server.close()


NUM_STREAMS = 32
PROMPTS = ["import os", "def read(", "class A:", "for i in", "x = [", "return", "if a", "while"]


def start_streams(server: Server, pool: ThreadPoolExecutor, max_tokens: int = 150) -> list[Future[Any]]:
    """Streams of which each has begun."""
    started = [Event() for _ in range(NUM_STREAMS)]
    streams = [
        pool.submit(server.complete, prompt, max_tokens, event, seed=index, temperature=index // len(PROMPTS) % 2)
        for index, (prompt, event) in enumerate(zip(itertools.cycle(PROMPTS), started, strict=False))
    ]
    for event in started:
        assert event.wait(TIMEOUT)
    return streams


def results(streams: list[Future[Any]]) -> list[Any]:
    return [stream.result(TIMEOUT) for stream in streams]


def test_whatever_happens_to_the_core_streams_end_as_if_nothing_had(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path) as server:
        expected = results(start_streams(server, pool))
        assert {result[3] for result in expected} == {"length"}
        for number in (signal.SIGTERM, signal.SIGINT):
            pid = server.core_pid
            streams = start_streams(server, pool)
            os.kill(pid, number)
            assert results(streams) == expected
            assert server.core_pid == pid, "signals for the group are for the front to answer"
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for busy in (True, False):
                streams = start_streams(server, pool) if busy else []
                os.kill(server.core_pid, number)
                wait_for(lambda: server.status("/ready") == 503)
                assert server.status("/health") == 200
                wait_for(lambda: server.status("/ready") == 200)
                assert results(streams) == (expected if busy else [])
        assert results(start_streams(server, pool)) == expected
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path) as server:
        streams = start_streams(server, pool, 300)
        server.process.send_signal(number)
        wait_for(lambda: server.status("/ready") == 503)
        status, body = server.complete("late", 3)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert {(len(tokens), finish) for _, tokens, _, finish in results(streams)} == {(300, "length")}
        assert server.process.wait(TIMEOUT) == 0


def test_replies_have_the_date_of_their_second(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for _ in range(2):
            before = int(time.time())
            date = parsedate_to_datetime(server.client.get("/health").headers["date"]).timestamp()
            assert before <= date <= time.time()
            time.sleep(1.1)
        server.process.terminate()


def test_what_marks_thinking_is_known_before_the_first_request(tmp_path: Path) -> None:
    with served(tmp_path, "--reasoning-parser", "qwen3") as server:
        body = {"prompt": "import os", "max_tokens": 2, "thinking_token_budget": 1}
        reply = server.client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        server.process.terminate()


def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(TIMEOUT) == 0


@pytest.mark.parametrize("flags", [(), ("--api-server-count", "2")], ids=["one", "two"])
def test_a_server_that_is_still_loading_ends_at_once(tmp_path: Path, flags: tuple[str, ...]) -> None:
    server = Server(tmp_path / "log", *flags)
    try:
        wait_for(lambda: server.pids("core_process"))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0
        server.assert_gone()
    finally:
        server.close()


def test_the_second_signal_stops_and_streams_still_get_their_last_event(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path) as server:
        streams = start_streams(server, pool, 1000)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.status("/ready") == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0
        assert {finish for _, _, _, finish in results(streams)} == {"abort"}


def test_the_deadline_of_a_drain_ends_what_is_left(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path, "--shutdown-timeout", "0") as server:
        streams = start_streams(server, pool, 1000)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0
        assert {finish for _, _, _, finish in results(streams)} == {"abort"}


def test_a_killed_server_leaves_nothing_and_a_stopped_one_goes_on(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path) as server:
        assert not [
            line for line in Path(f"/proc/{server.process.pid}/maps").read_text().splitlines() if "torch" in line
        ]
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        assert int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) < 150 << 10
        pid = server.core_pid
        streams = start_streams(server, pool, 200)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # longer than any silence the supervisor would bear from the core
        server.process.send_signal(signal.SIGCONT)
        assert {finish for _, _, _, finish in results(streams)} == {"length"}
        assert server.core_pid == pid
        streams = start_streams(server, pool, 1000)
        os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.assert_gone()
        for stream in streams:
            assert isinstance(stream.exception(TIMEOUT), httpx.HTTPError)


def test_a_core_that_may_not_be_replaced_leaves_a_server_that_says_so(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path, "--max-engine-restarts", "0") as server:
        streams = start_streams(server, pool, 1000)
        os.kill(server.core_pid, signal.SIGKILL)
        wait_for(lambda: server.status("/health") == 503)
        assert server.status("/ready") == 503
        assert {finish for _, _, _, finish in results(streams)} == {"engine_unavailable"}
        status, body = server.complete("late", 3)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0


def test_several_fronts_share_one_core_and_each_may_die(tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool, served(tmp_path, "--api-server-count", "2") as server:
        expected = results(start_streams(server, pool))
        core, fronts = server.core_pid, server.pids("front_process")
        assert len(fronts) == 2
        streams = start_streams(server, pool)
        os.kill(core, signal.SIGKILL)
        assert results(streams) == expected
        core = wait_for(lambda: server.pids("core_process"))[0]
        os.kill(fronts[0], signal.SIGKILL)
        wait_for(lambda: len(server.pids("front_process")) == 2 and fronts[0] not in server.pids("front_process"))
        assert results(start_streams(server, pool)) == expected
        assert server.pids("core_process") == [core]
        streams = start_streams(server, pool, 300)
        server.process.send_signal(signal.SIGTERM)
        assert {finish for _, _, _, finish in results(streams)} == {"length"}
        assert server.process.wait(TIMEOUT) == 0


def test_fronts_and_core_end_with_their_parent(tmp_path: Path) -> None:
    with served(tmp_path, "--api-server-count", "2") as server:
        os.kill(server.core_pid, signal.SIGSTOP)
        os.kill(server.pids("front_process")[1], signal.SIGSTOP)
        server.process.kill()
        server.assert_gone()


def serve_once(*flags: str) -> tuple[int, str]:
    """Exit status and last words of a server that cannot start."""
    command = [sys.executable, "-m", "quire.cli.main", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_what_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = serve_once("--port", str(port))
    assert (status, line.startswith(f"quire: cannot listen on 127.0.0.1:{port}: Address already in use.")) == (2, True)
    status, line = serve_once("--host", "no.such.host.invalid", "--port", "0")
    assert (status, "no such address" in line) == (2, True)
    for more in ((), ("--api-server-count", "2")):
        status, line = serve_once("/nowhere/at/all", "--port", "0", *more)
        assert (status, line.startswith("quire: "), "/nowhere/at/all" in line) == (2, True, True), line
    (tmp_path / "file").write_text("")
    status, line = serve_once("--uds", str(tmp_path / "file"))
    assert (status, "no socket stands there" in line) == (2, True), line


def test_a_unix_socket_is_private_and_goes_with_the_server_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with served(tmp_path, "--uds", str(path)) as server:
        assert server.url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        server.client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://quire")
        assert server.status("/health") == 200
        assert serve_once("--uds", str(path))[0] == 2, "somebody listens there"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0
    assert not path.exists()


def test_flags_may_come_from_a_file_and_those_given_win(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: [first, second]\nmax_model_len: 256\nenable-prefix-caching: false\nseed: 3\n")
    with served(tmp_path, "--config", str(file)) as server:
        models = server.client.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["first", "second"]
        assert {model["max_model_len"] for model in models} == {1024}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: [", "--config"),
        ("- port", "must map flags"),
        ("prot: 1", "--prot is no flag"),
        ("port: x", "--port"),
        ("api-key:", "'api-key' has no value"),
        ("api_key: []", "'api_key' has no value"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    status, line = serve_once("--config", str(tmp_path / "serve.yaml"))
    assert (status, said in line) == (2, True), line
