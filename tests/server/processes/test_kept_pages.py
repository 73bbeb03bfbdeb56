"""A server that is stopped in order writes its cached KV pages to the file, and the next one finds them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.processes.test_processes import Server

PROMPT = "def read_lines(path):\n    with open(path) as file:\n" * 20
FRONTS = [(), ("--api-server-count", "2")]


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[Server]:
    kept = ("--kv-disk", str(directory / "kv"), "--kv-disk-size", "64M", "--kv-load-min-tokens", "1")
    server = Server(directory / "log", *kept, *flags)
    try:
        server.wait_ready()
        yield server
        server.assert_gone()
    finally:
        server.close()


def answer(server: Server) -> tuple[Any, int]:
    """(the choice, cached tokens)."""
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, "temperature": 0}
    reply = server.client.post("/v1/completions", json=body).json()
    return reply["choices"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def written(server: Server) -> list[int]:
    """Pages of each flush that the log tells of."""
    return [int(count) for count in re.findall(r"wrote (\d+) cached KV page", server.log.read_text())]


@pytest.mark.parametrize("fronts", FRONTS, ids=["one front", "two fronts"])
def test_a_restarted_server_finds_what_was_cached(tmp_path: Path, fronts: tuple[str, ...]) -> None:
    with running(tmp_path, *fronts) as server:
        first, cached = answer(server)
        assert cached == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        (count,) = written(server)
        assert count > 0
    with running(tmp_path, *fronts) as server:
        again, cached = answer(server)
        assert again == first
        assert cached > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert len(written(server)) == 1


def test_a_server_without_time_to_drain_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "--shutdown-timeout", "0") as server:
        answer(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert sum(written(server)) == 0


def test_a_core_that_was_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        first, _ = answer(server)
        os.kill(server.core_pid, signal.SIGKILL)
        assert answer(server)[0] == first
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(60)
    with running(tmp_path) as server:
        assert answer(server)[0] == first
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
