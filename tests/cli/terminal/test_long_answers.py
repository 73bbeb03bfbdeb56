"""One policy for a `max_tokens` that the context has no room for, on every way in: lowered, and said once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.server.conftest import Running

LIMIT, ASKED = 1024, 5000
PROMPT = [5] * 1000
SAID = re.compile(
    r"the answer can have (\d+) tokens?, not (\d+): the prompt takes (\d+) of the 1024 tokens of the context"
)
QUESTION = [{"role": "user", "content": "word " * 900}]
COMMAND = [sys.executable, "-m", "quire.cli.main"]
EVENT = re.compile(r"^(?:data: )?(\{.*)$", re.MULTILINE)

APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": ASKED, "n": 2}),
    "chat": ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": ASKED, "n": 2}),
    "chat, newer name": ("/v1/chat/completions", {"messages": QUESTION, "max_completion_tokens": ASKED}),
    "responses": ("/v1/responses", {"input": QUESTION, "max_output_tokens": ASKED}),
    "messages": ("/v1/messages", {"messages": QUESTION, "max_tokens": ASKED}),
    "ollama generate": ("/api/generate", {"prompt": QUESTION[0]["content"], "options": {"num_predict": ASKED}}),
    "ollama chat": ("/api/chat", {"messages": QUESTION, "options": {"num_predict": ASKED}}),
}


def counts(text: str) -> list[tuple[int, int, int]]:
    """(what is left, what was asked for, the prompt's length), as often as it is said."""
    return [(int(room), int(asked), int(length)) for room, asked, length in SAID.findall(text)]


def warnings_in(value: Any) -> list[str]:
    """The warnings of a reply, wherever they are."""
    if isinstance(value, dict):
        return [*value.get("warnings", ()), *(text for item in value.values() for text in warnings_in(item))]
    return [text for item in value for text in warnings_in(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", APIS)
def test_every_api_lowers_it_and_says_so_once(server: Running, name: str, stream: bool) -> None:
    path, body = APIS[name]
    reply = server.post(path, model="quire-tiny", **body, stream=stream)
    assert reply.status_code == 200, reply.text
    events = [json.loads(text) for text in EVENT.findall(reply.text)]
    # the last event of /v1/responses is the whole response, with all that the first one said
    told = warnings_in([event for event in events if event.get("type") != "response.completed"][:2])
    if name == "responses" and stream:
        told = warnings_in(events[0])
    assert len(told) == 1
    ((room, asked, length),) = counts(told[0])
    assert (room + length, asked) == (LIMIT, ASKED)
    assert "max_tokens" not in told[0], "each API has its own name for it"


def test_a_stream_of_several_prompts_says_each_length_once(server: Running) -> None:
    body = {"prompt": [PROMPT, PROMPT, PROMPT[:990]], "max_tokens": ASKED, "n": 2}
    for stream in (False, True):
        text = server.post("/v1/completions", **body, stream=stream).text
        assert sorted(counts(text)) == [(24, ASKED, 1000), (34, ASKED, 990)]


def test_the_answer_is_the_one_that_fits(server: Running) -> None:
    body = {"prompt": PROMPT, "ignore_eos": True, "temperature": 0}
    capped = server.post("/v1/completions", **body, max_tokens=ASKED).json()
    exact = server.post("/v1/completions", **body, max_tokens=LIMIT - len(PROMPT)).json()
    assert capped["choices"] == exact["choices"]
    assert capped["choices"][0]["finish_reason"] == "length"
    assert capped["usage"]["total_tokens"] == LIMIT
    assert "warnings" not in exact


def test_llm_lowers_it_and_logs_it_once_for_all_prompts(tiny_llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    outputs = tiny_llm.generate([PROMPT, PROMPT], SamplingParams(max_tokens=ASKED, n=2), use_tqdm=False)
    assert [counts(" ".join(output.warnings)) for output in outputs] == [[(24, ASKED, 1000)]] * 2
    assert counts(caplog.text) == [(24, ASKED, 1000)]
    caplog.clear()
    tiny_llm.chat(QUESTION, SamplingParams(max_tokens=ASKED), use_tqdm=False)
    assert len(counts(caplog.text)) == 1


def run(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=120, check=True, cwd=cwd)


@pytest.mark.parametrize(
    "argv", [["run", "hello there"], ["run", "--raw", "import os"], ["chat", "-q", "hello there"]], ids=" ".join
)
def test_commands_lower_it_and_say_so_once(argv: list[str]) -> None:
    done = run(*argv, "-n", str(ASKED))
    ((room, asked, length),) = counts(done.stderr)
    assert (room + length, asked) == (LIMIT, ASKED)
    assert not counts(done.stdout)


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_clients_of_a_server_repeat_what_it_says(server: Running, command: str) -> None:
    done = run(command, "--url", server.url, "-q", "hello there", "-n", str(ASKED))
    assert len(counts(done.stderr)) == 1


def test_a_chat_asks_for_no_more_than_fits_by_itself() -> None:
    done = run("run", "word " * 900)
    assert not counts(done.stderr)


def test_run_batch_writes_it_into_the_reply(tmp_path: Path) -> None:
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": PROMPT, "max_tokens": ASKED}}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    run("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", cwd=tmp_path)
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert counts(" ".join(json.loads(line)["response"]["body"]["warnings"])) == [(24, ASKED, 1000)]
