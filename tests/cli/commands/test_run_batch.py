"""`quire run-batch`: every line gets its answer, the server's own, and a run that was interrupted goes on."""

from __future__ import annotations

import argparse
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.batch_files import Earlier, ReplyFile, open_input, read_earlier, read_lines
from quire.cli.commands import run_batch
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


@pytest.mark.parametrize("limit", [None, 60_000])
def test_lines_wait_for_each_other_where_bodies_take_more_than_there_is(
    limit: int | None, batch: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Eight are sent at once, and all bodies together may take `limit`: none with less than one takes."""
    source, out = batch
    source.write_text("\n".join(line(f"r{i}", **TEXT, user="x" * 1000, metadata=["y" * 40_000]) for i in range(20)))
    parser = argparse.ArgumentParser()
    run_batch.add_arguments(parser)
    args = parser.parse_args(["-i", str(source), "-o", str(out), *FLAGS])
    args.max_total_body_size = limit or 30_000  # a command line has it for servers alone
    num_failed = 0 if limit else 20
    assert run_batch.run(args) == bool(num_failed)
    assert f"{20 - num_failed} succeeded, {num_failed} failed, 0 not answered" in capfd.readouterr().err
    found = replies(out)
    assert {reply["response"]["status_code"] for reply in found.values()} == {200 if limit else 503}


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


def test_lines_may_have_priorities_where_the_engine_serves_by_them(batch: tuple[Path, Path]) -> None:
    source, out = batch
    source.write_text("\n".join(line(f"r{i}", **TEXT, priority=-i) for i in range(2)))
    command = ["run-batch", "-i", str(source), "-o", str(out), *FLAGS]
    assert main([*command, "--scheduling-policy", "priority", "--priority-ageing", "0"]) == 0
    assert main([*command, "--overwrite"]) == 1
    statuses = {number: reply["response"]["status_code"] for number, reply in replies(out).items()}
    assert statuses == {1: 200, 2: 400}, "0 is what every request has"
    message = replies(out)[2]["response"]["body"]["error"]["message"]
    assert message.startswith("priority=-1 has no effect")


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


def run_quire(*argv: str, limit: int | None = None) -> tuple[int, str]:
    """(status, standard error without the log) of a process; `limit` is the size at which its files are full."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=restrict,
        env={**os.environ, "QUIRE_LOG_LEVEL": "ERROR"},
    )
    return done.returncode, done.stderr


def test_a_full_disk_is_said_once_and_resume_goes_on(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(f"r{i}", prompt="import os", max_tokens=2, seed=i) for i in range(40)))
    command = ["run-batch", "-i", str(source), "-o", str(out), *FLAGS]
    status, err = run_quire(*command, limit=5000)
    kept = len(replies(out))
    assert 0 < kept < 40
    assert status == 1
    told, summary = err.splitlines()
    assert told == (
        f"quire: --output-file {out} cannot be written: File too large. It holds {kept} whole replies. Make room, then "
        "--resume goes on from there."
    )
    assert summary == (
        f"{kept} succeeded, 0 failed, {40 - kept} not answered, 0 skipped (answered before), 0 retried: {out}"
    )
    assert out.read_bytes().endswith(b"\n")
    status, err = run_quire(*command, "--resume")
    assert (status, len(replies(out))) == (0, 40)
    assert f"{40 - kept} succeeded, 0 failed, 0 not answered, {kept} skipped (answered before), 0 retried" in err


def test_a_full_device_is_said_once(batch: tuple[Path, Path]) -> None:
    status, err = run_quire("run-batch", "-i", str(batch[0]), "-o", "/dev/full", *FLAGS)
    assert status == 1
    assert err.count("cannot be written: No space left on device. It holds 0 whole replies.") == 1
    assert len(err.splitlines()) == 2


def test_resume_retries_what_failed(batch: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    source, out = batch
    source.write_text(
        "\n".join([line("good", **TEXT), line("bad", prompt="x", temperature=9), "{", line("last", **TEXT)])
    )
    command = ["run-batch", "-i", str(source), "-o", str(out), *FLAGS]
    assert main(command) == 1
    first = out.read_bytes()
    good = [text for text in first.splitlines(keepends=True) if b'"status_code": 200' in text]
    assert main([*command, "--resume"]) == 1, "the entries still fail"
    assert "0 succeeded, 2 failed, 0 not answered, 2 skipped (answered before), 2 retried" in capfd.readouterr().err
    assert out.read_bytes().startswith(b"".join(good))
    assert set(replies(out)) == {1, 2, 3, 4}
    source.write_text("\n".join([line("good", **TEXT), line("bad", **TEXT), "{", line("last", **TEXT)]))
    assert main([*command, "--resume"]) == 1
    source.write_text("\n".join([line("good", **TEXT), line("bad", **TEXT), "", line("last", **TEXT)]))
    assert main([*command, "--resume"]) == 2, "a reply to a line that is gone"
    assert replies(out)[2]["response"]["status_code"] == 200
    assert list(out.parent.glob(".*")) == []


def test_the_output_is_not_touched_before_the_engine_is_ready(batch: tuple[Path, Path]) -> None:
    source, out = batch
    out.write_text("precious\n")
    assert main(["run-batch", "-i", str(source), "-o", str(out), "--overwrite", "--model", "/no/model"]) == 2
    assert out.read_text() == "precious\n"


def test_a_file_that_ends_at_any_byte_can_be_used(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    values = [
        {
            "id": f"batch_req_{n}",
            "custom_id": f"é{n}",
            "response": {"status_code": 200 if n % 2 else 500},
            "error": None,
        }
        for n in range(1, 5)
    ]
    lines = [json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values]
    whole = b"".join(lines)
    for end in range(len(whole) + 1):
        out.write_bytes(whole[:end])
        earlier = read_earlier(str(out))
        num_whole = whole[:end].count(b"\n")
        assert sorted(earlier.custom_ids) == list(range(1, num_whole + 1))
        assert earlier.succeeded == {n for n in range(1, num_whole + 1) if n % 2}
        with ReplyFile(str(out), earlier) as file:
            file.write(values[3])
        kept = [lines[n - 1] for n in range(1, num_whole + 1) if n % 2 or not earlier.failed]
        assert out.read_bytes() == b"".join(kept) + lines[3]


def test_a_reply_that_does_not_fit_leaves_nothing_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    with ReplyFile(str(out), read_earlier(str(out))) as file:
        file.write({"n": 1})
        file._file = _Half(file._file)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space"):
            file.write({"n": 2})
    assert out.read_bytes() == b'{"n": 1}\n'


class _Half:
    """A file on a disk with three bytes left."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._room = 3

    def write(self, data: Any) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room = 0
        return int(self._file.write(data[:3]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_lines_are_read_one_at_a_time_and_long_ones_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"a" * 10 + b"\n" + b"b" * 11 + b"\n\n  \n" + b"c" * (5 << 20) + b"\r\nd")
    with open_input(str(source)) as file:
        found = list(read_lines(file, 10))
        assert [(found_line.number, found_line.is_too_long) for found_line in found] == [
            (1, False),
            (2, True),
            (5, True),
            (6, False),
        ]
        assert max(len(found_line.data) for found_line in found) <= 11
        assert isinstance(read_lines(file, 10), Iterator)


def test_a_line_that_is_too_long_is_an_entry_with_an_error(batch: tuple[Path, Path]) -> None:
    source, out = batch
    source.write_text(line("long", prompt="x" * 2000) + "\n" + line("short", **TEXT))
    command = ["run-batch", "-i", str(source), "-o", str(out), "--max-body-size", "500", *FLAGS]
    assert main(command) == 1
    assert "longer than --max-body-size" in replies(out)[1]["error"]["message"]
    assert replies(out)[2]["response"]["status_code"] == 200
    assert main([*command, "--resume"]) == 1


def test_requests_may_come_through_a_pipe(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        pipe.write(line("text", **TEXT))
    try:
        assert main(["run-batch", "-i", f"/dev/fd/{reading}", "-o", str(out), *FLAGS]) == 0
    finally:
        os.close(reading)
    assert replies(out)[1]["response"]["status_code"] == 200


def test_a_custom_id_that_is_no_unicode_comes_back_in_a_file_that_is(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    reply = {"id": "batch_req_1", "custom_id": "a\ud800\u00e9", "response": {"status_code": 200}, "error": None}
    with ReplyFile(str(out), Earlier({}, frozenset(), 0)) as file:
        file.write(reply)
    assert json.loads(out.read_bytes().decode("utf-8", "strict")) == reply
    assert read_earlier(str(out)).custom_ids == {1: "a\ud800\u00e9"}
