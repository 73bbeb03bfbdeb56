"""`/v1/stats?finished_since=` and `quire bench record`: the traffic of a real server, as a trace to simulate."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.cli.bench import record
from quire.cli.main import main
from quire.engine import async_llm_engine
from quire.server.api import admin
from quire.simulation.trace import read_trace
from tests.server.conftest import Running, Serve, stand_in, wait_for

SECRET = "zyzzogeton"


def finished(server: Running, cursor: str = "", **options: Any) -> Any:
    reply = server.client.get("/v1/stats", params={"finished_since": cursor}, **options)
    assert reply.status_code == 200, reply.text
    return reply.json()["finished"]


def complete(server: Running, prompt: str = "import os", max_tokens: int = 5, **fields: Any) -> Any:
    return server.post("/v1/completions", prompt=prompt, max_tokens=max_tokens, ignore_eos=True, **fields).json()


def test_requests_that_finish_are_told_once_with_their_lengths(server: Running) -> None:
    assert "finished" not in server.client.get("/v1/stats").json()
    start = finished(server)
    assert start["requests"] == []
    first = complete(server, f"{SECRET} is", user=SECRET)["usage"]
    complete(server, max_tokens=7, n=3)
    server.wait_idle()
    page = finished(server, start["cursor"])
    one, three = page["requests"]
    assert (one["prompt_tokens"], one["output_tokens"], one["n"]) == (first["prompt_tokens"], 5, 1)
    assert (three["output_tokens"], three["n"], three["outcome"]) == (21, 3, "finished")
    assert start["now_s"] < one["arrived_s"] < three["arrived_s"] < page["now_s"]
    assert page["num_missed"] == 0
    assert finished(server, page["cursor"])["requests"] == []
    assert finished(server, start["cursor"])["requests"] == page["requests"], "nothing is used up by reading"
    assert SECRET not in json.dumps(page)


def test_a_prompt_of_before_is_told_as_cached(server: Running) -> None:
    prompt = "def read_lines(path):\n" * 12
    complete(server, prompt)
    start = finished(server)["cursor"]
    usage = complete(server, prompt)["usage"]
    (request,) = finished(server, start)["requests"]
    assert 0 < request["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_those_that_are_aborted_are_told_too(server: Running) -> None:
    start = finished(server)["cursor"]
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    ) as reply:
        next(reply.iter_lines())
    wait_for(lambda: finished(server, start)["requests"])
    (request,) = finished(server, start)["requests"]
    assert request["outcome"] == "aborted"
    assert 0 < request["output_tokens"] < 900


def test_a_long_list_comes_in_pages(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_FINISHED", 2)
    cursor = finished(server)["cursor"]
    complete(server, ["a"] * 5, max_tokens=1)  # type: ignore[arg-type]
    counts = []
    for _ in range(4):
        page = finished(server, cursor)
        cursor = page["cursor"]
        counts.append(len(page["requests"]))
    assert counts == [2, 2, 1, 0]


@pytest.mark.parametrize("cursor", ["0", "now", "0" * 16 + "-x", "9" * 65, "%00", "f" * 40])
def test_junk_is_refused(server: Running, cursor: str) -> None:
    reply = server.client.get(f"/v1/stats?finished_since={cursor}")
    assert reply.status_code == 400
    assert "finished_since" in reply.text


def test_it_takes_a_key_where_there_are_keys(serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.jsonl"
    with serve(api_key=("secret",)) as guarded:
        assert guarded.client.get("/v1/stats?finished_since=").status_code == 401
        assert finished(guarded, headers={"authorization": "Bearer secret"})["requests"] == []
        assert main(["bench", "record", "--url", guarded.url, "-o", str(out), "--for", "0.01"]) == 2
        assert "401" in capfd.readouterr().err
        assert (
            main(["bench", "record", "--url", guarded.url, "--api-key", "secret", "-o", str(out), "--for", "0.1"]) == 0
        )
        assert "0 requests" in capfd.readouterr().err


@contextmanager
def recording(server: Running, out: Path) -> Iterator[Path]:
    """`quire bench record` beside what is done here, until Ctrl-C; what it says is in a file."""
    said = out.with_suffix(".log")
    command = [sys.executable, "-m", "quire.cli.main", "bench", "record", "--url", server.url, "-o", str(out)]
    with said.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            wait_for(lambda: "recording" in said.read_text())
            yield said
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, said.read_text()
        finally:
            process.kill()


def num_lines(out: Path) -> int:
    return len(out.read_text().splitlines())


def test_what_was_recorded_can_be_simulated(server: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.jsonl"
    given = [(1, 3), (2, 9), (1, 30)]
    with recording(server, out) as said:
        usage = [complete(server, "import sys\n" * count, count, n=n)["usage"] for n, count in given]
        wait_for(lambda: num_lines(out) == 3)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    trace = read_trace(str(out))
    assert [(one.n, one.output_tokens) for one in trace] == given
    assert [one.prompt_tokens for one in trace] == [one["prompt_tokens"] for one in usage]
    assert "3 requests" in said.read_text()
    assert main(["simulate", "--trace", str(out), "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["num_requests"] == 3
    assert figures["total_input_tokens"] == sum(one["prompt_tokens"] for one in usage)
    assert figures["total_output_tokens"] == sum(one["completion_tokens"] for one in usage)


def test_gaps_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    request = {
        "arrived_s": 12.5,
        "prompt_tokens": 9,
        "cached_tokens": 3,
        "output_tokens": 7,
        "n": 2,
        "outcome": "aborted",
    }
    with (tmp_path / "a").open("w") as file:
        recorder = record.Recorder(file, 10.0)
        recorder.add({"num_missed": 4, "requests": [request, {**request, "arrived_s": 9.0}]})
        recorder.add({"num_missed": None, "requests": [{**request, "outcome": "failed"}]})
        recorder.num_unfinished = 6
    assert json.loads((tmp_path / "a").read_text()) == {
        "arrival_s": 2.5, "prompt_tokens": 9, "output_tokens": 4, "n": 2
    }  # fmt: skip
    assert recorder.summary() == (
        "1 request; 33.3% of their prompt tokens came from the prefix cache, which the file does not say; 1 left out "
        "that had come before; 1 left out that failed or had no token yet when they were aborted; 4 missed and 1 "
        "engine lost; 6 not finished yet"
    )
    told = capsys.readouterr().err
    assert "4 requests finished unseen" in told
    assert "the engine was replaced" in told


def test_a_busy_engine_is_asked_again(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm_engine, "RECORDING_TIMEOUT_S", 0.05)
    out = tmp_path / "trace.jsonl"
    with recording(server, out) as said, ThreadPoolExecutor(1) as pool:
        with stand_in(server) as held:
            asked = pool.submit(complete, server)
            wait_for(lambda: "asking again" in said.read_text())
            held.may_go.set()
            asked.result()
        wait_for(lambda: num_lines(out) == 1)
    assert len(read_trace(str(out))) == 1


@pytest.mark.parametrize("flags", [["--for", "0"], ["--for", "-1"], ["--for", "nan"], ["--for", "1e9"]])
def test_wrong_flags(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "never"
    assert main(["bench", "record", "-o", str(out), *flags]) == 2
    assert "--for must be above 0" in capfd.readouterr().err
    assert not out.exists()


def test_nobody_there_and_no_place_to_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    earlier = tmp_path / "x"
    earlier.write_text("{}\n")
    assert main(["bench", "record", "--url", "http://127.0.0.1:9", "-o", str(earlier)]) == 2
    assert "is a server running there?" in capfd.readouterr().err
    assert earlier.read_text() == "{}\n", "an earlier recording is kept until there is something to record"
    assert main(["bench", "record", "-o", "/no/such/directory/x"]) == 2
    assert "cannot be written" in capfd.readouterr().err
