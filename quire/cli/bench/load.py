"""Load on a server: requests sent at their time, what came back and when, and the figures made from it.

Open loop: a request is sent when it is due, however slow the server is, unless `max_concurrency` holds it back; its
times count from when it is sent. Times are seconds, in figures milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire.cli.client.http_client import EventReader, HttpClient, message_of
from quire.utils.math import percentile

T = TypeVar("T")

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between pieces of a stream",
    "e2el": "time from request to end",
}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def is_output(self) -> bool:
        delta = self.delta or _Delta()
        told = (self.text, delta.content, delta.reasoning_content, delta.reasoning, delta.tool_calls)
        return bool(self.finish_reason or any(told))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """What became of one request."""

    due_at: float = 0.0
    sent_at: float = 0.0
    ended_at: float = 0.0
    piece_times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_counted: bool = False
    """The server said how many tokens there were; else a piece counts as one."""
    error: str | None = None

    def on_data(self, data: bytes) -> None:
        """One event of the stream."""
        now = time.perf_counter()
        if data == b"[DONE]":
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self.error = message_of({"error": chunk.error}) or str(chunk.error)
        if chunk.choices and chunk.choices[0].is_output:
            self.piece_times.append(now)
        if chunk.usage is not None:
            self.num_prompt_tokens = chunk.usage.prompt_tokens
            self.num_output_tokens = chunk.usage.completion_tokens
            self.is_counted = True

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.piece_times[0] - self.sent_at

    @property
    def e2el(self) -> float:
        """Time to the end."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Time per token after the first one; None when there is none."""
        rest = self.num_output_tokens - 1
        return (self.piece_times[-1] - self.piece_times[0]) / rest if rest > 0 else None

    @property
    def itl(self) -> list[float]:
        """Times between pieces."""
        return [after - before for before, after in itertools.pairwise(self.piece_times)]

    def times(self) -> dict[str, list[float]]:
        """By metric."""
        return {
            "ttft": [self.ttft],
            "tpot": [] if self.tpot is None else [self.tpot],
            "itl": self.itl,
            "e2el": [self.e2el],
        }


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """The result of some work in a uvloop: asyncio's own loop takes more time from a server on the same machine."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def send_one(client: HttpClient, path: str, body: bytes, record: Record) -> None:
    """Send one request and read its stream to the end; what fails is in the record."""
    record.sent_at = time.perf_counter()
    try:
        reply = await client.post_encoded(path, body, EventReader(record.on_data))
        if reply.status != 200:
            record.error = reply.error
        elif not record.piece_times and record.error is None:
            record.error = "the stream ended without output"
    except ConnectionError as error:
        record.error = str(error)
    record.ended_at = time.perf_counter()
    if not record.is_counted:
        record.num_output_tokens = len(record.piece_times)


async def send_all(
    client: HttpClient,
    path: str,
    bodies: Sequence[bytes],
    times: Sequence[float],
    max_concurrency: int | None,
    on_end: Callable[[Record], None],
) -> tuple[list[Record], int]:
    """The records of all requests in order, and how many were in progress at once at most."""
    room = asyncio.Semaphore(max_concurrency or len(bodies))
    num_running = peak = 0
    started_at = time.perf_counter()
    records = [Record(due_at=started_at + due) for due in times]

    async def one(body: bytes, record: Record) -> None:
        nonlocal num_running, peak
        async with room:
            num_running += 1
            peak = max(peak, num_running)
            await send_one(client, path, body, record)
            num_running -= 1
        on_end(record)

    async with asyncio.TaskGroup() as tasks:
        for body, record in zip(bodies, records, strict=True):
            wait = record.due_at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(body, record))
    return records, peak


def figures(
    records: Sequence[Record], percentiles: Iterable[float], goodput: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Rates, latencies in ms and errors, under the names of vLLM's result files. `goodput`: metric -> limit in ms."""
    done = [record for record in records if record.error is None]
    duration = max(record.ended_at for record in records) - min(record.sent_at for record in records)
    num_input = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "errors": dict(Counter(record.error for record in records if record.error is not None).most_common()),
    }
    times = [record.times() for record in done]
    if goodput:
        good = sum(
            all(max(each[name], default=0.0) * 1e3 <= limit for name, limit in goodput.items()) for each in times
        )
        result["request_goodput"] = good / duration
    for name in METRICS:
        values = [1e3 * value for each in times for value in each[name]]
        if values:
            result[f"mean_{name}_ms"] = statistics.fmean(values)
            result[f"median_{name}_ms"] = statistics.median(values)
            result[f"std_{name}_ms"] = statistics.pstdev(values)
            for percent in percentiles:
                result[f"p{percent:g}_{name}_ms"] = percentile(values, percent)
    return result
