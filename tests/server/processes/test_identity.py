"""Fronts of a server give the same answers, fronts and cores that come later included, or none."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from quire.engine.core_startup import EMBEDDED_MODEL
from tests.server.processes.test_fronts import only
from tests.server.processes.test_processes import Server, served, wait_for

ASK = {"x-quire-receipt": "1"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model that may be changed."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "my-model"))


def completed(server: Server) -> Any:
    body = {"prompt": "import os", "max_tokens": 4, "temperature": 1.0}
    reply = server.client.post("/v1/completions", json=body, headers=ASK)
    assert reply.status_code == 200, reply.text
    return reply.json()


def seed(server: Server) -> int:
    found = completed(server)["receipt"]["requests"][0]["sampling_params"]["seed"]
    assert isinstance(found, int)
    return found


def killed_front(server: Server) -> int:
    """Kill a front and return once it is gone."""
    front = server.pids("front_process")[0]
    os.kill(front, signal.SIGKILL)
    wait_for(lambda: front not in server.pids("front_process"))
    return front


def ended(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


@pytest.mark.parametrize("flags", [(), ("--seed", "5")])
def test_unseeded_requests_are_new_ones_in_every_front_and_in_those_that_come_later(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with served(tmp_path, "--api-server-count", "2", *flags) as server:
        seeds = []
        for front in server.pids("front_process"):
            with only(server, front):
                seeds += [seed(server) for _ in range(8)]
        before = server.pids("front_process")
        killed_front(server)
        wait_for(lambda: len(server.pids("front_process")) == 2)
        (successor,) = set(server.pids("front_process")) - set(before)
        with only(server, successor):
            seeds += [seed(server) for _ in range(8)]
        assert len(set(seeds)) == 24
        ended(server)


def test_a_front_that_finds_another_tokenizer_is_done_without_until_none_is_left(model: Path, tmp_path: Path) -> None:
    with served(tmp_path, str(model), "--api-server-count", "2") as server:
        prints = set()
        for front in server.pids("front_process"):
            with only(server, front):
                prints.add(completed(server)["system_fingerprint"])
        expected = server.complete("import os", 20, seed=1)
        assert len(prints) == 1
        with (model / "chat_template.jinja").open("a") as file:
            file.write("Be rude.")
        killed_front(server)
        said = r"a front process cannot be replaced, 1 are left: the tokenizer in"
        wait_for(lambda: said in server.log.read_text())
        assert len(server.pids("front_process")) == 1
        assert server.complete("import os", 20, seed=1) == expected
        assert server.log.read_text().count("another one in") == 1  # nor is it tried again
        killed_front(server)
        assert server.process.wait(60) == 2
        assert "has changed since the engine started" in server.log.read_text().splitlines()[-1]


def test_a_stream_ends_with_an_error_rather_than_with_tokens_of_other_weights(model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, served(tmp_path, str(model)) as server:
        expected = server.complete("import os", 900, seed=1)[1]
        started = Event()
        stream = pool.submit(server.complete, "import os", 900, started, seed=1)
        assert started.wait(60)
        file = model / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1000] ^= 1
        file.write_bytes(data)
        os.kill(server.core_pid, signal.SIGKILL)
        _, tokens, _, finish = stream.result()
        assert finish == "engine_unavailable"
        assert 0 < len(tokens) < 900
        assert tokens == expected[: len(tokens)]
        wait_for(lambda: server.status("/health") == 503)
        status, body = server.complete("import os", 4)
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        log = server.log.read_text()
        assert "the weights have changed since the engine started" in log
        assert (log.count("; restart 1 in"), log.count("; restart 2 in")) == (1, 0)
        ended(server)
