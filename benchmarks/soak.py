"""Ten minutes of load and abuse against `quire serve` with the embedded model; fails when anything is lost or leaks.

    python -m benchmarks.soak [--seconds 600] [--clients 256]

Clients stream without a pause, four kinds of API, known requests among them whose text must never change. Beside them
others leave at random moments, read a little and then nothing, ask for what is refused, send half a request, or come
500 within a second. Once a minute all is still: then blocks, requests, tasks, threads and descriptors must be back
where they were. Prints a table and exits with 1 when a rule is broken. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak_measures import Half, Level
from quire.cli.client.http_client import HttpClient
from quire.utils.process import raise_descriptor_limit

MAX_QUEUED = 384
"""Less than clients and a burst together: part of a burst must be told to come again."""
FLAGS = f"--kv-cache-memory-bytes 128M --max-queued-requests {MAX_QUEUED}".split()
SLACK = 2
"""Descriptors and tasks that may come and go."""
POOL_THREADS = 24
"""The two work pools of a front start their threads as they need them, and keep them."""
MAX_NEW_SERIES = 200
"""Of outcomes that had not come before; less than the models that are asked for in vain."""
MAX_GROWTH_MIB, MAX_SLOPE_MIB_PER_MIN, MAX_P99_RATIO = 20.0, 1.0, 1.2
MEMORY_S = 180
"""Shorter runs have no slope: what the first requests take for good would be most of it."""
STILL_S = 60
"""Longest wait for what must come: a slow reader is cut, a server without clients is as it was.

It keeps idle connections for 5 s.
"""
ESTABLISHED = "01"
"""In /proc/net/tcp."""
ENDINGS = (b"data: [DONE]\n\n", b"message_stop", b"response.completed", b"response.incomplete")
CHUNKED_END = b"\r\n0\r\n\r\n"


# What is asked for.


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of which only the sending is left to do."""

    path: str
    body: bytes


WORDS = [f"{stem}{end}" for stem in ("re", "im", "de", "class", "for", "self", "x") for end in ("", "port ", "f ", " ")]


def asks(rng: random.Random, count: int, *, stream: bool = True, max_tokens: int = 96) -> list[Ask]:
    """Requests of all kinds and lengths. Half of the prompts begin alike."""
    return [_ask(rng, stream, rng.randrange(8, max_tokens)) for _ in range(count)]


def _ask(rng: random.Random, stream: bool, max_tokens: int) -> Ask:
    prompt = rng.choice(("", "import os\n" * 20)) + "".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
    fixed = {"stream": stream, "temperature": rng.choice((0, 0.8)), "ignore_eos": True}
    conversation = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    path, fields = rng.choice(
        [
            ("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "seed": rng.randrange(1000)}),
            ("/v1/chat/completions", {**conversation, "seed": rng.randrange(1000)}),
            ("/v1/messages", {**conversation, "temperature": 0}),
            ("/v1/responses", {"input": prompt, "max_output_tokens": max_tokens, "temperature": 0}),
        ]
    )
    return Ask(path, json.dumps({**fixed, **fields}).encode())


def text_of(stream: bytes) -> str:
    """All text that a stream brought, whatever the API."""
    found = []
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            for part in (*event.get("choices", ()), event):
                delta = part.get("delta")
                found += [part.get("text", "")] if delta is None else [_delta_text(delta)]
    return "".join(found)


def _delta_text(delta: str | dict[str, str]) -> str:
    return delta if isinstance(delta, str) else delta.get("content") or delta.get("text", "")


# What is measured.


class Server:
    """`quire serve` in a process of its own, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, write_timeout_s: int) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.write_timeout_s = write_timeout_s
        (core,) = children(process.pid)
        self.pids = {"front": process.pid, "core": core}

    async def stats(self) -> dict[str, Any]:
        async with HttpClient(self.url) as client:
            status: dict[str, Any] = (await client.get("/v1/stats")).json()
        return status

    async def num_series(self) -> int:
        async with HttpClient(self.url) as client:
            return (await client.get("/metrics")).body.count(b"\n")

    def memory_mib(self) -> dict[str, float]:
        """PSS without mapped files: the share of those depends on what other programs map."""
        found: dict[str, float] = {}
        for name, pid in self.pids.items():
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
            found |= {f"{name} RSS": sizes["Rss"], f"{name} PSS": sizes["Pss"] - sizes["Pss_File"]}
        return found

    async def level(self) -> Level:
        held = {"asyncio tasks": (await self.stats())["num_tasks"]}
        for name, pid in self.pids.items():
            held[f"{name} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
            held[f"{name} threads"] = len(os.listdir(f"/proc/{pid}/task"))
        return Level(time.monotonic(), self.memory_mib(), held)


def children(pid: int) -> list[int]:
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(found).split()]


@contextlib.contextmanager
def served(directory: Path, write_timeout_s: int) -> Iterator[Server]:
    """A server whose temporary files and log are in a directory."""
    log, temporary = directory / "log", directory / "tmp"
    temporary.mkdir()
    flags = ["--port", "0", "--write-timeout", str(write_timeout_s), *FLAGS]
    command = [sys.executable, "-m", "quire.cli.main", "serve", *flags]
    with log.open("wb") as stderr:
        environment = {**os.environ, "TMPDIR": str(temporary), "QUIRE_LOG_LEVEL": "INFO"}
        process = subprocess.Popen(command, stderr=stderr, env=environment)
    try:
        while (found := re.search(r"serving on (\S+),", log.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        yield Server(process, found[1], log, write_timeout_s)
    finally:
        process.terminate()
        process.wait()


# The clients. Each runs until the end of its round and leaves nothing open.


class Soak:
    """Load on a server, and what came of it."""

    def __init__(self, server: Server, num_clients: int, seed: int = 0) -> None:
        self.server = server
        self.num_clients = num_clients
        self.halves: list[Half] = []
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        """What nobody asked for."""
        self.still: list[Level] = []
        """One after each round, when nothing is going on."""
        self.busy: list[Level] = []
        """The last half, every few seconds."""
        self._rng = random.Random(seed)
        self._asks = asks(self._rng, 2000)
        self._short = asks(self._rng, 200, stream=False, max_tokens=16)
        self._known = asks(self._rng, 16)
        self._text: dict[Ask, str] = {}
        self._client = HttpClient(server.url)
        self._end = 0.0
        self._half = Half()
        address = server.url.rpartition("/")[2].partition(":")
        self._address = address[0], int(address[2])

    async def run(self, seconds: float, num_rounds: int) -> None:
        """Warm up, then load in rounds, half of them in each half."""
        for ask in self._known:
            await self._stream(ask, is_known=True)
        num_series = 0
        for index in range(num_rounds + 1):
            if index in (1, num_rounds // 2 + 1):
                self._half = Half()
                self.halves.append(self._half)
                self.busy.clear()
            await self._round(min(seconds, 10.0) if index == 0 else seconds / num_rounds)
            await self._be_still()
            num_series = num_series or await self.server.num_series()
            print(f"round {index}: {dict(self.counts)} {dict(self.errors) or ''}", file=sys.stderr, flush=True)
        more = await self.server.num_series() - num_series
        if more > MAX_NEW_SERIES:
            self.errors[f"{more} more metric series"] += 1

    async def _round(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        scale = self.num_clients / 256
        async with _sampled(self.server, self.busy), asyncio.TaskGroup() as tasks:
            for index in range(self.num_clients):
                tasks.create_task(self._stay(random.Random(self._rng.random()), index % 16 == 0))
            for _ in range(4):
                tasks.create_task(self._every(0.0, self._stall, 3.0 * self.server.write_timeout_s))
            tasks.create_task(self._every(2.0, lambda: self._together(self._leave() for _ in range(int(64 * scale)))))
            tasks.create_task(self._every(15.0, lambda: self._burst(int(500 * scale))))
            tasks.create_task(self._every(0.05, self._break_off))
            tasks.create_task(self._every(0.2, self._ask_wrongly))
        self._half.seconds += seconds
        await self._client.close()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]], takes_s: float = 0.0) -> None:
        """Once at least, then as long as there is time."""
        while True:
            try:
                await act()
            except OSError as error:
                self.errors[str(error)] += 1
            if time.monotonic() + seconds + takes_s >= self._end:
                return
            await asyncio.sleep(seconds)

    async def _together(self, clients: Iterator[Coroutine[Any, Any, None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client)

    async def _stay(self, rng: random.Random, is_careful: bool) -> None:
        """One stream after the other, to their ends."""
        while not self._is_over:
            is_known = is_careful and rng.random() < 0.5
            await self._stream(rng.choice(self._known if is_known else self._asks), is_known)

    async def _stream(self, ask: Ask, is_known: bool) -> None:
        half, stream = self._half, _Stream(self._half)
        reply = await self._send(self._client, ask, "stream", stream.keep if is_known else stream.take)
        if reply == 429:
            await asyncio.sleep(1)
        elif reply == 200 and stream.is_complete:
            half.requests.add(time.perf_counter() - stream.sent_at)
            if is_known:
                self._compare(ask, text_of(b"".join(stream.pieces)))
        elif reply == 200:
            self.errors[f"{ask.path}: the stream breaks off"] += 1

    def _compare(self, ask: Ask, text: str) -> None:
        self.counts["texts compared"] += 1
        if self._text.setdefault(ask, text) != text or not text:
            self.errors[f"{ask.path}: another text"] += 1

    async def _send(
        self,
        client: HttpClient,
        ask: Ask,
        kind: str,
        on_body: Callable[[bytes], None] | None = None,
        expected: Sequence[int] = (200, 429),
    ) -> int:
        """The status of the reply; 0 when there is none."""
        try:
            reply = await client.post_encoded(ask.path, ask.body, on_body)
        except ConnectionError as error:
            self.errors[f"{kind}: {error}"] += 1
            return 0
        self.counts[f"{kind}: {reply.status}"] += 1
        if reply.status not in expected:
            self.errors[f"{kind}: {reply.error}"] += 1
        return reply.status

    async def _leave(self) -> None:
        """Go away in the middle: in the queue, in the prefill, while tokens come."""
        ask = self._rng.choice(self._rng.choice((self._asks, self._short)))
        async with HttpClient(self.server.url) as client:
            try:
                async with asyncio.timeout(2 * self._rng.random() ** 3):
                    await self._send(client, ask, "storm, stayed", lambda piece: None)
            except TimeoutError:
                self.counts["storm, left"] += 1

    async def _burst(self, count: int) -> None:
        """That many connections within a second."""

        async def come() -> None:
            await asyncio.sleep(self._rng.random())
            async with HttpClient(self.server.url) as client:
                await self._send(client, self._rng.choice(self._short), "burst")

        await self._together(come() for _ in range(count))

    async def _ask_wrongly(self) -> None:
        """For a model that does not exist, another one each time."""
        body = json.dumps({"model": f"no-such-{self._rng.random()}", "prompt": "a"}).encode()
        async with HttpClient(self.server.url) as client:
            await self._send(client, Ask("/v1/completions", body), "wrong model", expected=(404,))

    async def _break_off(self) -> None:
        """Send a part of a request, nothing at times, and go: with FIN or with RST."""
        data = wire(self._rng.choice(self._asks))
        with socket.socket() as sock:
            await self._connect(sock)
            await asyncio.get_running_loop().sock_sendall(sock, data[: self._rng.randrange(len(data))])
            if self._rng.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.counts["requests broken off"] += 1

    async def _stall(self) -> None:
        """Ask for more than the sockets hold, read a little, then nothing: the server must hang up."""
        fields = {"prompt": "class", "n": 4, "max_tokens": 900, "logprobs": 20, "ignore_eos": True, "stream": True}
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await self._connect(sock)
            await loop.sock_sendall(sock, wire(Ask("/v1/completions", json.dumps(fields).encode())))
            received = await loop.sock_recv(sock, 100)
            if received.startswith(b"HTTP/1.1 429"):
                await asyncio.sleep(1)
                return
            was_cut = await self._hangs_up(sock)
            with contextlib.suppress(ConnectionResetError):
                while piece := await loop.sock_recv(sock, 1 << 16):
                    received = received[-100:] + piece
        self.counts["slow readers"] += 1
        if not was_cut or received.endswith(CHUNKED_END):
            self.errors["a slow reader was not cut"] += 1

    async def _hangs_up(self, sock: socket.socket) -> bool:
        """Read nothing until the server closes its end; whether it does.

        A fixed time would not do: a server that is slow to fill the sockets has nobody to cut yet.
        """
        deadline = time.monotonic() + STILL_S
        while is_open := has_peer(sock):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        return not is_open

    async def _connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)

    async def _be_still(self) -> None:
        """Wait until the server is as it was; what it keeps is an error."""
        deadline = time.monotonic() + STILL_S
        while (left := await self._left()) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        self.errors.update(left)
        self.still.append(await self.server.level())

    async def _left(self) -> list[str]:
        """What a server without clients still holds."""
        status = await self.server.stats()
        stats = status["stats"]
        found = [
            f"{value} {name} after the round"
            for name, value in (("requests", status["num_requests"]), ("running", stats["num_running"]))
            if value
        ]
        if stats["num_free_blocks"] != stats["num_total_blocks"]:
            found.append(f"{stats['num_total_blocks'] - stats['num_free_blocks']} blocks in use after the round")
        if status["num_restarts"]:
            found.append("the core was restarted")
        if self.still:
            now = (await self.server.level()).open
            base = self.still[0].open
            found += [
                f"{now[name]} {name}, {base[name]} at first" for name in now if now[name] > base[name] + slack(name)
            ]
        return found


def has_peer(sock: socket.socket) -> bool:
    """Whether the process at the other end of a connection on this machine has it open."""
    own, other = (_proc_address(address) for address in (sock.getsockname(), sock.getpeername()))
    return f" {other} {own} {ESTABLISHED} " in Path("/proc/net/tcp").read_text()


def _proc_address(address: tuple[str, int]) -> str:
    """An IPv4 address as /proc/net/tcp writes it."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


class _Stream:
    """The times of one stream's pieces."""

    def __init__(self, half: Half) -> None:
        self.sent_at = self._at = time.perf_counter()
        self.pieces: list[bytes] = []
        self._times = half.first
        self._gaps = half.gaps
        self._last = self._before = b""

    def take(self, piece: bytes) -> None:
        now = time.perf_counter()
        self._times.add(now - self._at)
        self._times, self._at = self._gaps, now
        self._before, self._last = self._last, piece

    def keep(self, piece: bytes) -> None:
        self.take(piece)
        self.pieces.append(piece)

    @property
    def tail(self) -> bytes:
        return self._before + self._last

    @property
    def is_complete(self) -> bool:
        return any(end in self.tail for end in ENDINGS) and b'"error":{' not in self.tail


def wire(ask: Ask) -> bytes:
    """A request as it goes over the network."""
    head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(ask.body)}"
    return head.encode() + b"\r\n\r\n" + ask.body


@contextlib.asynccontextmanager
async def _sampled(server: Server, levels: list[Level], every_s: float = 5.0) -> AsyncIterator[None]:
    async def sample() -> None:
        while True:
            await asyncio.sleep(every_s)
            levels.append(await server.level())

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()


# The rules.


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table."""

    name: str
    seen: str
    limit: str
    holds: bool
    is_time: bool = False


def rules(soak: Soak) -> list[Rule]:
    """What a server must keep, and whether it did."""
    found = [Rule("errors not asked for", str(soak.errors.total()), "0", not soak.errors)]
    for name, base in soak.still[0].open.items():
        most = max(level.open[name] for level in soak.still)
        found.append(Rule(f"{name} when still", f"{base} to {most}", f"+{slack(name)}", most <= base + slack(name)))
    if len(soak.busy) > 2 and soak.busy[-1].at - soak.busy[0].at > MEMORY_S:  # before, the KV cache is still filled
        found += memory_rules(soak)
    before, after = soak.halves
    for name, one, other in (
        ("first token", before.first, after.first),
        ("between tokens", before.gaps, after.gaps),
        ("request", before.requests, after.requests),
    ):
        old, new = one.percentile_ms(99), other.percentile_ms(99)
        text = f"{old:.0f} to {new:.0f} ms ({new / old:.2f})"
        found.append(Rule(f"p99 {name}", text, f"{MAX_P99_RATIO:g} x", new <= MAX_P99_RATIO * old, is_time=True))
    return found


def memory_rules(soak: Soak) -> list[Rule]:
    """That memory does not grow for ever."""
    found = []
    middle, end = soak.still[len(soak.still) // 2], soak.still[-1]
    for name, base_mib in middle.memory_mib.items():
        growth, limit = end.memory_mib[name] - base_mib, max(MAX_GROWTH_MIB, 0.02 * base_mib)
        text = f"{base_mib:.1f} MiB {growth:+.1f}"
        found.append(Rule(f"{name}, second half", text, f"+{limit:.0f} MiB", growth <= limit))
        per_minute = slope([level.at / 60 for level in soak.busy], [level.memory_mib[name] for level in soak.busy])
        text, limit_text = f"{per_minute:+.2f} MiB/min", f"{MAX_SLOPE_MIB_PER_MIN:g} MiB/min"
        found.append(Rule(f"{name}, slope of it", text, limit_text, per_minute <= MAX_SLOPE_MIB_PER_MIN))
    return found


def slack(name: str) -> int:
    """How many more there may be of something that is counted."""
    return POOL_THREADS if name.endswith("threads") else SLACK


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points (Theil-Sen)."""
    pairs = itertools.combinations(zip(xs, ys, strict=True), 2)
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in pairs)


def after_the_end(server: Server, directory: Path) -> list[Rule]:
    """What may be left of a server that was told to end."""
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(STILL_S)
    files = [str(path) for path in (directory / "tmp").rglob("*") if not path.name.startswith("quire-trace-")]
    said = [line for line in server.log.read_text().splitlines() if " I " not in line]
    left = [pid for pid in server.pids.values() if Path(f"/proc/{pid}").exists()]
    return [
        Rule("exit status", str(status), "0", status == 0),
        Rule("processes left", str(left or 0), "0", not left),
        Rule("temporary files left", str(files or 0), "0", not files),
        Rule("warnings and errors logged", " / ".join(said[:3]) or "0", "0", not said),
    ]


def soak_once(num_clients: int, seconds: float, num_rounds: int, write_timeout_s: int = 5) -> tuple[Soak, list[Rule]]:
    """A whole run with a server of its own."""
    raise_descriptor_limit()
    with tempfile.TemporaryDirectory() as name, served(Path(name), write_timeout_s) as server:

        async def run() -> Soak:
            soak = Soak(server, num_clients)
            await soak.run(seconds, num_rounds)
            return soak

        soak = asyncio.run(run())
        return soak, [*rules(soak), *after_the_end(server, Path(name))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=256)
    args = parser.parse_args()
    num_rounds = max(2, 2 * round(args.seconds / 120))
    soak, found = soak_once(args.clients, args.seconds, num_rounds)
    for half in soak.halves:
        rate = (len(half.gaps) + len(half.first)) / half.seconds
        print(f"{len(half.requests)} streams, {rate:,.0f} pieces/s, ", end="")
        print(", ".join(f"p{p} {half.gaps.percentile_ms(p):.1f} ms" for p in (50, 99)), "between tokens")
    print("\n".join(f"{count:>9,} {what}" for what, count in soak.counts.items()), end="\n\n")
    print("| rule | seen | limit | |\n|---|---|---|---|")
    for rule in found:
        print(f"| {rule.name} | {rule.seen} | {rule.limit} | {'holds' if rule.holds else '**broken**'} |")
    for error, count in soak.errors.most_common(20):
        print(f"{count} x {error}", file=sys.stderr)
    sys.exit(any(not rule.holds for rule in found))


if __name__ == "__main__":
    main()
