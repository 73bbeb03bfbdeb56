"""`quire run-batch`: every line gets its answer, the server's own, and a run that was interrupted goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.server.conftest import Running

FLAGS = ["--max-num-seqs", "4", "--num-gpu-blocks-override", "128"]


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


QUESTION = {"role": "user", "content": "What is a KV cache?"}
CHAT: dict[str, Any] = {"messages": [QUESTION], "max_tokens": 5, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "import os", "max_tokens": 5, "temperature": 0}
LINES = [
    line("chat", "/v1/chat/completions", **CHAT),
    line("text", **TEXT),
    "",
    "{",
    "[]",
    line("text", **TEXT),
    line("hot", prompt="x", temperature=9),
    line("embedding", "/v1/embeddings", input="x"),
    line("stream", prompt="x", stream=True),
    '{"custom_id": "twice", "custom_id": "twice"}',
    '{"custom_id": 5, "url": "/v1/completions", "body": {}}',
    '{"custom_id": "get", "method": "GET", "url": "/v1/completions", "body": {}}',
    '{"custom_id": "more", "url": "/v1/completions", "body": {}, "priority": 1}',
    '{"custom_id": "no body", "url": "/v1/completions"}',
]
ERRORS = {
    4: "Could not parse JSON",
    5: "must be a JSON object",
    6: "custom_id 'text' is that of an earlier line",
    8: "url must be one of",
    9: "cannot be streamed",
    10: "Duplicate key",
    11: "custom_id must be a non-empty string, got 5",
    12: "method must be POST, got 'GET'",
    13: "unknown field 'priority'",
    14: "body must be an object",
}


def replies(file: Path) -> dict[int, dict[str, Any]]:
    values = [json.loads(text) for text in file.read_text().splitlines()]
    found = {int(value["id"].removeprefix("batch_req_")): value for value in values}
    assert len(found) == len(values)
    return found


@pytest.fixture
def batch(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(LINES))
    return source, tmp_path / "out.jsonl"


def test_every_line_is_answered_as_the_server_answers_it(
    batch: tuple[Path, Path], server: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = batch
    assert main(["run-batch", "-i", str(source), "-o", str(out), *FLAGS]) == 1
    assert "2 succeeded, 11 failed" in capfd.readouterr().err
    found = replies(out)
    assert set(found) == set(range(1, 15)) - {3}
    for number, url, body in ((1, "/v1/chat/completions", CHAT), (2, "/v1/completions", TEXT)):
        response = found[number]["response"]
        expected = server.post(url, **body).json()
        assert (response["status_code"], found[number]["error"]) == (200, None)
        assert response["body"]["choices"] == expected["choices"]
        assert response["body"]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    refused = found[7]["response"]
    assert (refused["status_code"], found[7]["error"]) == (400, None)
    assert refused["body"] == server.post("/v1/completions", prompt="x", temperature=9).json()
    for number, message in ERRORS.items():
        assert found[number]["response"] is None
        assert found[number]["error"]["message"].startswith(f"line {number}: ")
        assert message in found[number]["error"]["message"]


def test_an_interrupted_run_goes_on_where_it_was(batch: tuple[Path, Path]) -> None:
    source, out = batch
    source.write_text("\n".join(line(f"r{i}", prompt="import os", max_tokens=2, seed=i) for i in range(6)))
    assert main(["run-batch", "-i", str(source), "-o", str(out), *FLAGS]) == 0
    whole = replies(out)
    kept = out.read_bytes().splitlines(keepends=True)[:3]
    out.write_bytes(b"".join(kept) + b'{"id": "batch_req_')
    assert main(["run-batch", "-i", str(source), "-o", str(out), "--resume", *FLAGS]) == 0
    assert out.read_bytes().startswith(b"".join(kept))
    again = replies(out)
    texts = [{n: reply["response"]["body"]["choices"] for n, reply in found.items()} for found in (whole, again)]
    assert texts[0] == texts[1]


def test_a_file_that_is_there_is_not_replaced_unasked(
    batch: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = batch
    out.write_text("precious\n")
    for flags, message in (([], "--resume to go on, or --overwrite"), (["--resume"], "does not answer this input")):
        assert main(["run-batch", "-i", str(source), "-o", str(out), *flags]) == 2
        assert message in capfd.readouterr().err
        assert out.read_text() == "precious\n"
    assert main(["run-batch", "-i", str(source), "-o", str(source), "--overwrite"]) == 2
    assert "is the input file" in capfd.readouterr().err
    assert source.read_text() == "\n".join(LINES)


@pytest.mark.parametrize(
    ("source", "out", "part"),
    [
        ("/no/file", "x", "--input-file /no/file cannot be read"),
        ("empty", "x", "holds no requests"),
        ("full", "/no/such/x", "--output-file /no/such/x cannot be written"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    source: str, out: str, part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "full").write_text(LINES[0])
    assert main(["run-batch", "-i", str(tmp_path / source), "-o", str(tmp_path / out)]) == 2
    out_text, err = capfd.readouterr()
    assert (out_text, err.count("\n")) == ("", 1)
    assert part in err
