"""`quire bench serve`: the figures follow from what came back and when; what fails is counted and shown."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from quire.cli.bench.load import Record, figures
from quire.cli.bench.serve import MAX_LINE_BYTES
from quire.cli.client.http_client import EventReader
from quire.cli.main import main
from quire.simulation.synthetic import due_times
from tests.server.conftest import Running

SMALL = ["--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "5", "--disable-tqdm"]


def record(*times: float, sent_at: float = 0.0, num_tokens: int = 0, error: str | None = None) -> Record:
    made = Record(sent_at=sent_at, ended_at=times[-1], piece_times=list(times), error=error)
    made.num_output_tokens = num_tokens or len(times)
    made.num_prompt_tokens = 10
    return made


def test_figures_are_those_of_the_records() -> None:
    records = [record(0.1, 0.2, 0.4), record(0.3, 0.5, 0.7), record(1.0, error="500: no"), record(1.0, error="500: no")]
    result = figures(records, [50, 100], {"ttft": 200})
    assert (result["completed"], result["failed"], result["errors"]) == (2, 2, {"500: no": 2})
    assert result["duration"] == pytest.approx(1.0)
    assert result["output_throughput"] == pytest.approx(6)
    assert result["total_token_throughput"] == pytest.approx(26)
    assert result["request_goodput"] == pytest.approx(1)
    assert (result["mean_ttft_ms"], result["p100_ttft_ms"]) == pytest.approx((200, 300))
    assert result["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)
    assert result["median_itl_ms"] == result["p50_itl_ms"] == pytest.approx(200)
    assert result["p100_e2el_ms"] == pytest.approx(700)


def test_a_piece_of_several_tokens_is_one_gap_and_several_tokens() -> None:
    one = record(0.1, 0.4, num_tokens=4)
    assert one.itl == pytest.approx([0.3])
    assert one.tpot == pytest.approx(0.1)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning": "a"},
        {"reasoning_content": "a"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_whatever_a_model_writes_is_output(delta: dict[str, object]) -> None:
    made = Record()
    for each in ({"role": "assistant", "content": ""}, delta):
        made.on_data(json.dumps({"choices": [{"index": 0, "delta": each, "finish_reason": None}]}).encode())
    assert len(made.piece_times) == 1


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_requests_are_due_at_the_rate_and_as_unevenly_as_asked(burstiness: float) -> None:
    times = due_times(20_000, 50.0, burstiness, random.Random(0))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.1)
    assert due_times(3, float("inf"), burstiness, random.Random(0)) == [0, 0, 0]


def test_events_are_the_same_however_the_body_is_cut() -> None:
    body = b': keep-alive\n\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata: [DONE]\n\n'
    for size in range(1, len(body)):
        found: list[bytes] = []
        reader = EventReader(found.append)
        for start in range(0, len(body), size):
            reader(body[start : start + size])
        assert found == [b'{"a": 1}', b"[DONE]"]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_server_is_measured(server: Running, backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    flags = ["--goodput", "e2el:600000", "--save-result", str(file), "--save-detailed", "--metadata", "host=here"]
    load = ["--max-concurrency", "2", "--num-warmups", "1", "--request-rate", "200"]
    assert main(["bench", "serve", "--base-url", server.url, "--backend", backend, *SMALL, *flags, *load]) == 0
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["host"]) == (6, 0, "here")
    assert result["output_lens"] == [5] * 6
    assert result["total_output_tokens"] == 30
    assert result["tokens_are_counted_by"] == "usage"
    assert result["max_concurrent_requests"] <= 2
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert all(0 < result[f"mean_{name}_ms"] <= result["p99_e2el_ms"] for name in ("ttft", "tpot", "itl", "e2el"))
    out = capfd.readouterr().out
    assert "6 requests in" in out
    assert "p99" in out
    server.wait_idle()


def test_a_file_of_prompts_is_used_again_until_there_are_enough(server: Running, tmp_path: Path) -> None:
    file, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    file.write_text('{"prompt": "import os", "output_tokens": 3}\n\n{"prompt": [5, 6, 7], "output_tokens": 4}\n')
    dataset = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "5", "--ignore-eos"]
    written = ["--save-result", str(result), "--save-detailed"]
    assert main(["bench", "serve", "--base-url", server.url, *dataset, *written]) == 0
    assert json.loads(result.read_text())["output_lens"] == [3, 4, 3, 4, 3]


def test_requests_that_are_refused_are_counted_by_their_message(
    server: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", server.url, *SMALL, "--temperature", "9"]) == 1
    out = capfd.readouterr().out
    assert "0 requests" in out
    assert "6 x 400 Bad Request" in out
    assert "temperature" in out


WRONG = {
    "nobody listens": (["--port", "1"], ["cannot connect to http://127.0.0.1:1", "quire serve"]),
    "no URL": (["--base-url", "ftp://x"], ["'ftp://x' is no URL of a server"]),
    "port": (["--base-url", "http://x:99999"], ["is no URL of a server"]),
    "rate 0": (["--request-rate", "0"], ["--request-rate must be above 0, got 0"]),
    "rate NaN": (["--request-rate", "nan"], ["--request-rate must be above 0, got nan"]),
    "burstiness": (["--burstiness", "-1"], ["--burstiness must be above 0"]),
    "no prompts": (["--num-prompts", "0"], ["--num-prompts must be at least 1"]),
    "concurrency": (["--max-concurrency", "0"], ["--max-concurrency must be at least 1"]),
    "ratio": (["--random-range-ratio", "1"], ["--random-range-ratio must be in [0, 1)"]),
    "goodput": (["--goodput", "speed:5"], ["--goodput: 'speed' is none of ttft, tpot, itl, e2el"]),
    "goodput no number": (["--goodput", "ttft:fast"], ["--goodput ttft must be numbers", "'fast'"]),
    "goodput no value": (["--goodput", "ttft"], ["--goodput takes NAME:VALUE, got 'ttft'"]),
    "percentiles": (["--metric-percentiles", "50,101"], ["--metric-percentiles must be numbers from 0 to 100"]),
    "metrics": (["--percentile-metrics", "ttft,speed"], ["--percentile-metrics: 'speed'"]),
    "dataset without file": (["--dataset-name", "custom"], ["needs --dataset-path"]),
    "no such dataset": (["--dataset-name", "custom", "--dataset-path", "/no/file"], ["/no/file cannot be read"]),
    "file without dataset": (["--dataset-path", "x"], ["--dataset-path has no effect"]),
    "details without result": (["--save-detailed"], ["--save-detailed has no effect without --save-result"]),
    "nowhere to write": (["--save-result", "/no/such/x.json"], ["--save-result /no/such/x.json cannot be written"]),
    "misspelt": (["--max-concurency", "4"], ["did you mean '--max-concurrency'?"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_one_line_and_status_2(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags, parts = WRONG[name]
    try:
        status = main(["bench", "serve", *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capfd.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["line 2", "not JSON"]),
        ("", ["line 2", f"more than {MAX_LINE_BYTES} bytes"]),
        ("[]", ["line 2", "`prompt` or `messages`"]),
        ('{"prompt": "a", "messages": []}', ["either"]),
        ('{"prompt": 5}', ["text or token ids", "got 5"]),
        ('{"prompt": "a", "output_tokens": 0}', ["output_tokens must be a whole number above 0, got 0"]),
        ('{"messages": []}', ["--backend openai-chat"]),
    ],
)
def test_a_wrong_line_of_a_dataset_is_named(
    line: str, parts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line if line else "x" * (MAX_LINE_BYTES + 1)}\n')
    assert main(["bench", "serve", "--dataset-name", "custom", "--dataset-path", str(file)]) == 2
    err = capfd.readouterr().err
    for part in parts:
        assert part in err
