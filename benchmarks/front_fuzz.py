"""Expensive bodies against `quire serve` with healthy streams beside them: nobody else may notice.

    python -m benchmarks.front_fuzz [--bodies 2000] [--senders 8] [--seed 0]

Bodies are made to cost much for their size: each field at its bound and beyond it, nested, repeated, with long keys,
up to the size that the server takes. A process of its own sends them with one API key. Meanwhile 8 streams with another
key run without a pause and `/health` is asked 50 times a second. Prints a table and exits with 1 when a rule is broken.
Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.cli.client.credentials import authorization
from quire.cli.client.http_client import HttpClient

HEALTHY_KEY, FUZZ_KEY = "healthy", "fuzz"
NUM_STREAMS = 8
NUM_LONGEST = 64
"""Gaps that are looked at: those of the longest moments."""
SAME_MOMENT_S = 0.1
STREAM_TOKENS = 100
MAX_BYTES = 16 << 20
HEALTH_EVERY_S = 0.02
MAX_EXTRA_GAP_MS = 100.0
MAX_HEALTH_P999_MS = 50.0
MAX_FRONT_MIB = 1024.0
"""Resident memory of the front at its worst; SECURITY.md says what it is made of."""
UNDISTURBED_S = 15.0


class Raw(str):
    """A JSON text that stands for itself."""


Make = Callable[[random.Random, int], Raw]
"""(random numbers, about how many bytes) -> the value of a field."""


# What makes a value expensive.


def repeated(item: str) -> Make:
    """A list of the same small item."""
    return lambda rng, size: Raw("[" + ",".join([item] * max(1, size // (len(item) + 1))) + "]")


def text_of(piece: str) -> Make:
    """A string of the same piece; the piece is written as JSON already."""
    return lambda rng, size: Raw('"' + piece * max(1, size // len(piece)) + '"')


def integers(rng: random.Random, size: int) -> Raw:
    """Distinct numbers, most of them token ids."""
    return Raw("[" + ",".join(str(number % 8192) for number in range(size // 5)) + "]")


def nested(opening: str, closing: str, inner: str = "1") -> Make:
    """Objects or lists inside each other, as deep as the size allows."""
    return lambda rng, size: Raw(
        opening * (size // (len(opening) + len(closing))) + inner + closing * (size // (len(opening) + len(closing)))
    )


def bounded_nested(rng: random.Random, size: int) -> Raw:
    """As deep as is allowed, again and again."""
    item = '{"k":' * 50 + "[1]" + "}" * 50
    return Raw("[" + ",".join([item] * max(1, size // len(item))) + "]")


def many_keys(rng: random.Random, size: int) -> Raw:
    """An object of many members."""
    return Raw("{" + ",".join(f'"key{number}":1' for number in range(size // 12)) + "}")


def long_keys(rng: random.Random, size: int) -> Raw:
    """An object whose keys are long, in a list, so that paths to them are longer."""
    key = "k" * max(1, size // 20)
    return Raw(f'{{"{key}":' * 10 + "[" + ",".join(["{}"] * 100) + "]" + "}" * 10)


def same_keys(rng: random.Random, size: int) -> Raw:
    """An object that has one key again and again."""
    return Raw("{" + ",".join(['"a":1'] * (size // 6)) + "}")


def big_number(rng: random.Random, size: int) -> Raw:
    """A number of many digits."""
    return Raw("9" * min(size, 100_000))


def _message(content: Raw) -> Raw:
    return Raw(f'[{{"role":"user","content":{content}}}]')


VALUES: dict[str, Make] = {
    "empty lists": repeated("[]"),
    "lists of one": repeated("[1]"),
    "empty objects": repeated("{}"),
    "lists of an object": repeated("[{}]"),
    "equal numbers": repeated("1"),
    "numbers": integers,
    "floats": repeated("1.5e300"),
    "infinities": repeated("1e999"),
    "nulls": repeated("null"),
    "short strings": repeated('"a"'),
    "messages": repeated('{"role":"user","content":"a"}'),
    "parts": repeated('{"type":"text","text":"a"}'),
    "message of parts": lambda rng, size: _message(VALUES["parts"](rng, size)),
    "long message": lambda rng, size: _message(text_of("word ")(rng, size)),
    "tool calls": repeated('{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[[[]]]"}}]}'),
    "deep lists": nested("[", "]"),
    "deep objects": nested('{"a":', "}"),
    "deep, repeated": bounded_nested,
    "many keys": many_keys,
    "long keys": long_keys,
    "same keys": same_keys,
    "letters": text_of("a"),
    "spaces": text_of(" "),
    "words": text_of("import os "),
    "special tokens": text_of("<|im_start|>"),
    "escapes": text_of("\\n"),
    "unicode escapes": text_of("\\u0061"),
    "surrogates": text_of("\\ud800"),
    "emoji": text_of("\U0001f600"),
    "marks": text_of("e\u0301\u0302"),
    "big number": big_number,
}
COMPLETION = {"prompt": "a", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
SAMPLING = [
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "seed",
    "temperature",
    "min_tokens",
    "unknown",
    "model",
]
ROUTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/completions": (COMPLETION, [*SAMPLING, "prompt", "prompt", "cache_salt", "request_id", "metadata", "user"]),
    "/v1/chat/completions": (
        CHAT,
        [*SAMPLING, "messages", "messages", "tools", "documents", "chat_template_kwargs", "chat_template", "metadata"],
    ),
    "/v1/responses": (
        {"input": "a", "max_output_tokens": 4},
        [*SAMPLING, "input", "input", "instructions", "include", "reasoning", "text", "metadata"],
    ),
    "/v1/messages": (CHAT, [*SAMPLING, "messages", "system", "stop_sequences", "metadata"]),
    "/v1/messages/count_tokens": (CHAT, ["messages", "system", "unknown"]),
    "/tokenize": ({"prompt": "a"}, ["prompt", "messages", "unknown"]),
    "/detokenize": ({"tokens": [1]}, ["tokens", "tokens", "unknown"]),
}
ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a b c " * 150, "max_tokens": 16, "n": 16, "logprobs": 20, "echo": True}),
    ("/v1/completions", {"prompt": ["a"] * 128, "max_tokens": 4, "n": 4}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 64, "n": 64, "allowed_token_ids": list(range(4000))}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 64, "bad_words": [f"word {i}" for i in range(60)]}),
    ("/v1/completions", {"prompt": "x = 1\n" * 200, "max_tokens": 1, "prompt_logprobs": 20}),
    ("/v1/chat/completions", {**CHAT, "n": 32, "max_tokens": 32, "logprobs": True, "top_logprobs": 20}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 64, "logit_bias": {str(i): 1 for i in range(300)}}),
]
"""Requests that are served, each of which asks for much."""


@dataclass(frozen=True, slots=True)
class Body:
    """One request of the fuzzer."""

    kind: str
    path: str
    data: bytes


def bodies(rng: random.Random, count: int, max_bytes: int = MAX_BYTES) -> Iterator[Body]:
    """Expensive bodies of every kind, most of them small, some as large as is allowed."""
    for _ in range(count):
        if rng.random() < 0.1:
            path, fields = rng.choice(ALLOWED)
            yield Body("allowed", path, json.dumps({**fields, "seed": rng.randrange(1000)}).encode())
            continue
        path = rng.choice(list(ROUTES))
        base, names = ROUTES[path]
        name, kind = rng.choice(names), rng.choice(list(VALUES))
        size = int(10 ** rng.uniform(3, 7.25))
        value = VALUES[kind](rng, min(size, max_bytes - 200))
        yield Body(f"{name}: {kind}", path, _encoded({**base, name: value}))


def _encoded(fields: dict[str, Any]) -> bytes:
    members = (f"{json.dumps(name)}:{v if isinstance(v, Raw) else json.dumps(v)}" for name, v in fields.items())
    return ("{" + ",".join(members) + "}").encode()


# Sending them, in a process of its own.


def write_bodies(directory: Path, count: int, seed: int) -> None:
    """Make the bodies before anything is measured: that takes more time than to send them."""
    with (directory / "index").open("w") as index, (directory / "bodies").open("wb") as file:
        for body in bodies(random.Random(seed), count):
            index.write(json.dumps([body.kind, body.path, len(body.data)]) + "\n")
            file.write(body.data)


def written_bodies(directory: Path) -> Iterator[Body]:
    """The bodies that were made."""
    with (directory / "index").open() as index, (directory / "bodies").open("rb") as file:
        for line in index:
            kind, path, size = json.loads(line)
            yield Body(kind, path, file.read(size))


async def send_all(url: str, directory: Path, num_senders: int) -> Counter[str]:
    """Send the bodies, some at a time; how they were answered."""
    found: Counter[str] = Counter()
    waiting = written_bodies(directory)

    async def sender() -> None:
        async with HttpClient(url, headers=authorization(url, FUZZ_KEY)) as client:
            for body in waiting:
                sent_at = time.monotonic()
                try:
                    async with asyncio.timeout(120):
                        reply = await client.post_encoded(body.path, body.data)
                    sent.write(json.dumps([sent_at, time.monotonic(), reply.status, body.path, body.kind]) + "\n")
                except (ConnectionError, TimeoutError) as error:
                    found[f"{type(error).__name__} {body.path} {body.kind}"] += 1
                    continue
                found[str(reply.status)] += 1
                if reply.status >= 500 and reply.status != 503:
                    found[f"{reply.status} {body.path} {body.kind}"] += 1

    with (directory / "sent").open("w") as sent:
        await asyncio.gather(*(sender() for _ in range(num_senders)))
    return found


def under_way(directory: Path, start: float, end: float) -> Counter[str]:
    """Bodies that were sent and not answered between two times of `time.monotonic`."""
    sent = map(json.loads, (directory / "sent").read_text().splitlines())
    return Counter(
        f"{status} {path} {kind}" for since, until, status, path, kind in sent if since < end and until > start
    )


# What healthy clients see meanwhile.


@dataclass(slots=True)
class Seen:
    """What streams and health checks measured, in milliseconds."""

    first: list[float] = field(default_factory=list)
    """Times to the first piece."""
    gaps: list[float] = field(default_factory=list)
    """Between two pieces of a stream."""
    longest: list[tuple[float, float]] = field(default_factory=list)
    """The longest gaps, and when they ended, in seconds of `time.monotonic`."""
    health: list[float] = field(default_factory=list)
    num_streams: int = 0
    front_mib: float = 0.0
    core_mib: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    def add_gap(self, gap: float, ended_at: float) -> None:
        """Take down a time between two pieces."""
        self.gaps.append(gap)
        if len(self.longest) < NUM_LONGEST:
            heapq.heappush(self.longest, (gap, ended_at))
        elif gap > self.longest[0][0]:
            heapq.heapreplace(self.longest, (gap, ended_at))

    def worst_moments(self) -> list[tuple[float, float]]:
        """The longest gaps, the longest first; of streams that waited together one."""
        moments: list[tuple[float, float]] = []
        for gap, ended_at in sorted(self.longest, reverse=True):
            if all(abs(ended_at - other) > SAME_MOMENT_S for _, other in moments):
                moments.append((gap, ended_at))
        return moments


class Healthy:
    """Streams that run all the while and must say the same as at first, and checks of health."""

    def __init__(self, url: str, pids: dict[str, int]) -> None:
        self._client = HttpClient(url, headers=authorization(url, HEALTHY_KEY))
        self._url = url
        self._pids = pids
        self._texts: dict[int, bytes] = {}

    async def watch(self, until: Callable[[], bool]) -> Seen:
        """Run streams and checks until told to stop."""
        seen = Seen()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_health(seen, until))
            tasks.create_task(self._weigh(seen, until))
            for seed in range(NUM_STREAMS):
                tasks.create_task(self._stream(seen, until, seed))
        await self._client.close()
        return seen

    async def _stream(self, seen: Seen, until: Callable[[], bool], seed: int) -> None:
        fields = {"prompt": "import os", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True, "seed": seed}
        while not until():
            pieces: list[bytes] = []
            last = time.monotonic()

            def take(piece: bytes, pieces: list[bytes] = pieces) -> None:
                nonlocal last
                now = time.monotonic()
                if pieces:
                    seen.add_gap(1e3 * (now - last), now)
                else:
                    seen.first.append(1e3 * (now - last))
                last = now
                pieces.append(piece)

            try:
                reply = await self._client.post("/v1/completions", {**fields, "temperature": 1}, take)
            except ConnectionError as error:
                seen.errors[f"stream: {error}"] += 1
                continue
            texts = b"".join(re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', b"".join(pieces)))
            if reply.status != 200:
                seen.errors[f"stream: {reply.error}"] += 1
            elif self._texts.setdefault(seed, texts) != texts:
                seen.errors["stream: another text"] += 1
            seen.num_streams += 1

    async def _check_health(self, seen: Seen, until: Callable[[], bool]) -> None:
        async with HttpClient(self._url) as client:
            while not until():
                sent_at = time.perf_counter()
                reply = await client.get("/health")
                seen.health.append(1e3 * (time.perf_counter() - sent_at))
                if reply.status != 200:
                    seen.errors[f"/health: {reply.status}"] += 1
                await asyncio.sleep(HEALTH_EVERY_S)

    async def _weigh(self, seen: Seen, until: Callable[[], bool]) -> None:
        while not until():
            seen.front_mib = max(seen.front_mib, resident_mib(self._pids["front"]))
            seen.core_mib = max(seen.core_mib, resident_mib(self._pids["core"]))
            await asyncio.sleep(0.05)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def served(directory: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """(url, process ids) of a server with two keys."""
    log = directory / "log"
    flags = ["--port", "0", "--kv-cache-memory-bytes", "128M", "--api-key", HEALTHY_KEY, FUZZ_KEY]
    with log.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "quire.cli.main", "serve", *flags], stderr=stderr)
    try:
        while (found := re.search(r"serving on (\S+),", log.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        tasks = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children")]
        core = int(next(iter(children or " ".join(tasks).split())))
        yield found[1], {"front": process.pid, "core": core}
        log_text = log.read_text(errors="replace")
        print(f"log: {len(log_text.splitlines())} lines, {log_text.count('Traceback')} tracebacks", file=sys.stderr)
    finally:
        process.terminate()
        process.wait()


def measure(
    count: int, num_senders: int, seed: int, undisturbed_s: float = UNDISTURBED_S
) -> tuple[Seen, Seen, Counter[str]]:
    """(undisturbed, disturbed, how the bodies were answered)."""
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as (url, pids):
        write_bodies(Path(name), count, seed)

        async def run() -> tuple[Seen, Seen, Counter[str]]:
            healthy = Healthy(url, pids)
            deadline = time.monotonic() + undisturbed_s
            alone = await healthy.watch(lambda: time.monotonic() > deadline)
            command = [sys.executable, "-m", "benchmarks.front_fuzz", "--send-to", url, "--from", name]
            command += ["--senders", str(num_senders)]
            fuzzer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert fuzzer.stdout is not None
            answer = asyncio.create_task(fuzzer.stdout.read())
            disturbed = await healthy.watch(answer.done)
            for gap, ended_at in disturbed.worst_moments():
                bodies_then = under_way(Path(name), ended_at - gap / 1e3, ended_at)
                print(f"gap of {gap:.0f} ms beside {dict(bodies_then)}", file=sys.stderr)
            return alone, disturbed, Counter(json.loads(await answer))

        return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table."""

    name: str
    undisturbed: str
    disturbed: str
    limit: str
    holds: bool
    is_time: bool = False


def percentile(values: list[float], percent: float) -> float:
    """The value that so many percent do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def _first(seen: Seen) -> str:
    return f"{percentile(seen.first, 50):.0f} / {percentile(seen.first, 99):.0f}"


def rules(alone: Seen, disturbed: Seen, answers: Counter[str]) -> list[Rule]:
    """What healthy clients are promised, and whether it held."""
    worst, limit = max(alone.gaps), max(alone.gaps) + MAX_EXTRA_GAP_MS
    p999 = percentile(disturbed.health, 99.9)
    faults = {what: count for what, count in answers.items() if " " in what}
    errors = alone.errors + disturbed.errors
    return [
        Rule("longest gap of a stream, ms", f"{worst:.0f}", f"{max(disturbed.gaps):.0f}", f"{limit:.0f}",
             max(disturbed.gaps) <= limit, True),
        Rule("time to first piece, p50 / p99, ms", _first(alone), _first(disturbed), "", True, True),
        Rule("/health p99.9, ms", f"{percentile(alone.health, 99.9):.1f}", f"{p999:.1f}", f"{MAX_HEALTH_P999_MS:g}",
             p999 <= MAX_HEALTH_P999_MS, True),
        Rule("front, MiB", f"{alone.front_mib:.0f}", f"{disturbed.front_mib:.0f}", f"{MAX_FRONT_MIB:g}",
             disturbed.front_mib <= MAX_FRONT_MIB),
        Rule("core, MiB", f"{alone.core_mib:.0f}", f"{disturbed.core_mib:.0f}", "", True),
        Rule("streams that ended with another text or an error", "0", str(errors.total()), "0", not errors),
        Rule("bodies that were not answered, or with a fault of the server", "", str(sum(faults.values())), "0",
             not faults),
    ]  # fmt: skip


def main() -> None:
    """Measure and print; with --send-to only send."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=2000)
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--send-to", help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send_to:
        os.nice(10)
        print(json.dumps(asyncio.run(send_all(args.send_to, args.directory, args.senders))))
        return
    alone, disturbed, answers = measure(args.bodies, args.senders, args.seed)
    found = rules(alone, disturbed, answers)
    print("| rule | undisturbed | with the bodies | limit | |\n|---|---|---|---|---|")
    for rule in found:
        holds = "holds" if rule.holds else "**broken**"
        print(f"| {rule.name} | {rule.undisturbed} | {rule.disturbed} | {rule.limit} | {holds} |")
    gaps = [f"p{p} {percentile(disturbed.gaps, p):.1f}" for p in (50, 99, 99.9)]
    print(
        f"\n{disturbed.num_streams} streams beside the bodies, {alone.num_streams} before; gaps {', '.join(gaps)} ms,"
    )
    print(f"median before {statistics.median(alone.gaps):.1f} ms. Answers: {dict(answers)}. {dict(disturbed.errors)}")
    sys.exit(any(not rule.holds for rule in found))


if __name__ == "__main__":
    main()
