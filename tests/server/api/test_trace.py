"""/v1/trace and `quire trace`: what operators get of the flight recorder, and what nobody gets."""

from __future__ import annotations

import json
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.observability.flight_recorder import NUM_STEPS
from quire.server.api.trace import MAX_AT_ONCE
from tests.observability.traces import checked, slices
from tests.server.conftest import Running, Serve, stand_in, wait_for

SECRET = "zyzzogeton"


def trace_of(server: Running, query: str = "", **options: Any) -> Any:
    reply = server.client.get(f"/v1/trace{query}", **options)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    return reply.json()


def test_requests_are_in_the_trace_by_id_and_never_by_text(server: Running) -> None:
    reply = server.client.post(
        "/v1/completions",
        json={"prompt": f"{SECRET} is", "max_tokens": 5, "ignore_eos": True, "user": SECRET},
        headers={"x-request-id": SECRET},
    )
    assert reply.status_code == 200
    trace = trace_of(server)
    events = checked(trace)
    request = slices(events, "request")[-1]
    assert (request["args"]["output_tokens"], request["args"]["outcome"]) == (5, "finished")
    on_track = [each["name"] for each in events if each["ph"] == "X" and each["tid"] == request["tid"]]
    assert on_track[-4:] == ["front", "queued", "prefill", "decode"]
    text = json.dumps(trace)
    assert SECRET not in text
    assert reply.json()["choices"][0]["text"] not in text


def test_the_last_steps_can_be_asked_for_alone(server: Running) -> None:
    server.post("/v1/completions", prompt="a", max_tokens=20, ignore_eos=True)
    numbers = [each["args"]["step"] for each in slices(checked(trace_of(server)), "step")]
    last = trace_of(server, "?steps=7")
    assert [each["args"]["step"] for each in slices(checked(last), "step")] == numbers[-7:]
    assert last["otherData"]["num_steps"] == 7
    assert trace_of(server, f"?steps={NUM_STEPS}")["otherData"]["num_steps"] == len(numbers)


@pytest.mark.parametrize(
    "query",
    [
        "steps=0",
        "steps=-1",
        f"steps={NUM_STEPS + 1}",
        "steps=",
        "steps=many",
        "steps=1.5",
        "steps=1e3",
        "steps=" + "9" * 5000,
        "steps=%00",
        "steps[]=5",
        "steps=5&steps=6",
        "step=5",
        "steps=5&format=proto",
    ],
)
def test_junk_is_refused_with_the_name_of_what_is_wrong(server: Running, query: str) -> None:
    reply = server.client.get(f"/v1/trace?{query}")
    assert reply.status_code == 400, reply.text
    assert "step" in reply.json()["error"]["message"] or reply.json()["error"]["param"] == "steps"


def test_other_methods_are_refused(server: Running) -> None:
    assert server.client.post("/v1/trace", json={}).status_code == 405


def test_it_takes_a_key_where_there_are_keys(serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(api_key=("secret",)) as guarded:
        assert guarded.client.get("/v1/trace").status_code == 401
        assert guarded.client.get("/v1/trace", headers={"authorization": "Bearer wrong"}).status_code == 401
        checked(trace_of(guarded, headers={"authorization": "Bearer secret"}))
        out = tmp_path / "trace.json"
        assert main(["trace", "--url", guarded.url, "-o", str(out)]) == 2
        assert "401" in capfd.readouterr().err
        assert not out.exists()
        assert main(["trace", "--url", guarded.url, "--api-key", "secret", "-o", str(out), "--steps", "2"]) == 0
        checked(json.loads(out.read_text()))
        assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_a_server_that_is_full_still_gives_it(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.async_llm_engine.RECORDING_TIMEOUT_S", 0.05)
    with serve(max_concurrent_requests=1) as small, ThreadPoolExecutor(1) as pool, stand_in(small):
        running = pool.submit(httpx.post, f"{small.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        wait_for(lambda: small.parts.core.has_work())
        assert small.post("/v1/completions", prompt="b", max_tokens=1).status_code == 429
        reply = small.client.get("/v1/trace")
        assert reply.status_code == 503, "it is the core that is busy; the limit is not for operators"
        assert not running.done()


def test_slow_readers_of_traces_are_counted_and_let_go(server: Running) -> None:
    server.post("/v1/completions", prompt="a", max_tokens=300, ignore_eos=True)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    readers = []
    for _ in range(MAX_AT_ONCE):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(address)
        reader.sendall(b"GET /v1/trace HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reader.recv(12) == b"HTTP/1.1 200"
        readers.append(reader)
    reply = server.client.get("/v1/trace")
    assert reply.status_code == 429, "their replies are too long for the buffers of a socket"
    assert reply.headers["retry-after"] == "1"
    for reader in readers:
        reader.close()
    wait_for(lambda: server.client.get("/v1/trace?steps=1").status_code == 200)


def test_a_core_in_a_long_step_is_said_to_be_busy(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.async_llm_engine.RECORDING_TIMEOUT_S", 0.05)
    with ThreadPoolExecutor(1) as pool, stand_in(server):
        pool.submit(httpx.post, f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        wait_for(lambda: server.parts.core.has_work())
        reply = server.client.get("/v1/trace")
        assert reply.status_code == 503
        assert "between two steps" in reply.json()["error"]["message"]
    server.wait_idle()
    assert server.client.get("/v1/trace").status_code == 200


def test_the_command_writes_a_file_or_to_standard_output(
    server: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main(["trace", "--url", f"{server.url}/v1", "-o", str(out)]) == 0
    assert "ui.perfetto.dev" in capfd.readouterr().err
    checked(json.loads(out.read_text()))
    assert main(["trace", "--url", server.url, "-o", "-"]) == 0
    checked(json.loads(capfd.readouterr().out))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["-o", "/no/such/directory/x"], "--output /no/such/directory/x cannot be written"),
        (["--steps", "0"], "steps"),
        (["--steps", "many"], "--steps"),
        (["--url", "http://127.0.0.1:1"], "is a server running there?"),
        (["--url", "ftp://x"], "is no URL of a server"),
    ],
)
def test_a_command_that_cannot_succeed_says_why(
    server: Running, capfd: pytest.CaptureFixture[str], flags: list[str], part: str, tmp_path: Path
) -> None:
    try:
        status = main(["trace", "--url", server.url, "-o", str(tmp_path / "t"), *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert part in capfd.readouterr().err


def test_offline_there_is_one_too(tmp_path: Path) -> None:
    with LLM() as llm:
        llm.generate([SECRET, "b"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        trace = llm.trace(tmp_path / "trace.json")
    events = checked(trace)
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    assert len(slices(events, "step")) == 4
    assert len(slices(events, "request")) == 2
    assert SECRET not in json.dumps(trace)
