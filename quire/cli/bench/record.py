"""`quire bench record`: the traffic of a running server as a trace that `quire simulate --trace` takes.

Asks `/v1/stats` once a second which requests have finished. What it could not learn of is said, never made up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from quire.cli.output import check_writable, reason_of
from quire.cli.sampling_flags import add_server_flags
from quire.errors import ConfigError, counted
from quire.utils.math import cdiv

if TYPE_CHECKING:
    from quire.cli.client.http_client import HttpClient

FILE = "quire-requests.jsonl"
PAUSE_S = 1.0
MAX_SECONDS = 1e7


def add_arguments(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Flags of this subcommand."""
    parser = kinds.add_parser("record", help="requests of a running server, for `quire simulate --trace`")
    add_server_flags(parser, url="http://127.0.0.1:8000")
    parser.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="how long (default: until Ctrl-C)")
    parser.add_argument("-o", "--output", default=FILE, metavar="FILE", help=f"where to write it (default: {FILE})")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record.

    Raises: ConfigError when the server cannot be asked or refuses, or the file cannot be written.
    """
    from quire.cli.client.credentials import authorization
    from quire.cli.client.http_client import HttpClient

    if args.seconds is not None and not 0 < args.seconds <= MAX_SECONDS:
        raise ConfigError(f"--for must be above 0 and at most {MAX_SECONDS:g} seconds, got {args.seconds}")
    url = str(args.url).rstrip("/").removesuffix("/v1")
    client = HttpClient(url, headers=authorization(url, args.api_key))
    check_writable("--output", args.output)
    try:
        recorder = asyncio.run(_record(client, args.output, args.seconds))
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be written: {reason_of(error)}") from None
    print(f"{args.output}: {recorder.summary()}", file=sys.stderr)
    return 0


@dataclass(slots=True)
class Recorder:
    """What has been recorded, and what could not be."""

    file: IO[str]
    began_at: float
    """By the server's clock."""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_earlier: int = 0
    """Those that had come before the recording began."""
    num_empty: int = 0
    """Those that failed, or were aborted before their first token."""
    num_missed: int = 0
    num_cores_lost: int = 0
    num_unfinished: int = 0

    def add(self, finished: Mapping[str, Any]) -> None:
        """Take in a page."""
        if finished["num_missed"] is None:
            self.num_cores_lost += 1
            print("the engine was replaced: requests that finished just before may be missing", file=sys.stderr)
        elif finished["num_missed"]:
            self.num_missed += finished["num_missed"]
            print(f"{counted(finished['num_missed'], 'request')} finished unseen", file=sys.stderr)
        for request in finished["requests"]:
            self._add_one(request)
        self.file.flush()

    def _add_one(self, request: Mapping[str, Any]) -> None:
        arrival_s = request["arrived_s"] - self.began_at
        if arrival_s < 0:
            self.num_earlier += 1
        elif request["outcome"] == "failed" or not request["output_tokens"]:
            self.num_empty += 1
        else:
            num_branches = request["n"]
            line = {
                "arrival_s": round(arrival_s, 6),
                "prompt_tokens": request["prompt_tokens"],
                "output_tokens": cdiv(request["output_tokens"], num_branches),
                **({"n": num_branches} if num_branches > 1 else {}),
            }
            self.file.write(json.dumps(line) + "\n")
            self.num_requests += 1
            self.num_prompt_tokens += request["prompt_tokens"]
            self.num_cached_tokens += request["cached_tokens"]

    def summary(self) -> str:
        """What the file holds, and what it lacks."""
        parts = [counted(self.num_requests, "request")]
        if self.num_cached_tokens:
            share = self.num_cached_tokens / self.num_prompt_tokens
            parts.append(f"{share:.1%} of their prompt tokens came from the prefix cache, which the file does not say")
        if self.num_earlier:
            parts.append(f"{self.num_earlier} left out that had come before")
        if self.num_empty:
            parts.append(f"{self.num_empty} left out that failed or had no token yet when they were aborted")
        if self.num_missed or self.num_cores_lost:
            lost = f" and {counted(self.num_cores_lost, 'engine')} lost" if self.num_cores_lost else ""
            parts.append(f"{self.num_missed} missed{lost}")
        if self.num_unfinished:
            parts.append(f"{self.num_unfinished} not finished yet")
        return "; ".join(parts)


async def _record(client: HttpClient, output: str, seconds: float | None) -> Recorder:
    """The file is not touched before the server has answered."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with client:
        try:
            status = await _asked(client, "")
        except ConnectionError as error:
            raise ConfigError(f"{error}; is a server running there? `quire serve` starts one") from None
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(output, flags, 0o600), "w", encoding="utf-8") as file:
            recorder = Recorder(file, status["finished"]["now_s"])
            await _take_until(client, status["finished"]["cursor"], recorder, stop, seconds)
    return recorder


async def _take_until(
    client: HttpClient, cursor: str, recorder: Recorder, stop: asyncio.Event, seconds: float | None
) -> None:
    until = None if seconds is None else time.monotonic() + seconds
    print(f"recording {client.url}{'' if seconds else '; Ctrl-C ends it'}", file=sys.stderr)
    while not stop.is_set() and (until is None or time.monotonic() < until):
        pause_s = PAUSE_S if until is None else min(PAUSE_S, max(0.0, until - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause_s)
        cursor = await _take_all(client, cursor, recorder)


async def _take_all(client: HttpClient, cursor: str, recorder: Recorder) -> str:
    """Take all pages there are; the cursor to go on with. A server that cannot answer now is asked again later."""
    while True:
        try:
            status = await _asked(client, cursor)
        except ConnectionError as error:
            print(f"{error}; asking again", file=sys.stderr)
            return cursor
        recorder.add(status["finished"])
        recorder.num_unfinished, cursor = status["num_requests"], status["finished"]["cursor"]
        if not status["finished"]["requests"]:
            return cursor


async def _asked(client: HttpClient, cursor: str) -> dict[str, Any]:
    """Raises: ConnectionError when the server cannot answer now; ConfigError when it never will."""
    path = f"/v1/stats?finished_since={quote(cursor)}"
    reply = await client.get(path)
    if reply.status in (429, 503):
        raise ConnectionError(f"{client.url}{path} answered {reply.error}")
    if reply.status != 200:
        raise ConfigError(f"{client.url}{path} answered {reply.error}")
    status: dict[str, Any] = reply.json()
    if "finished" not in status:
        raise ConfigError(
            f"{client.url} does not say which requests have finished: it is another server, or an older one"
        )
    return status
