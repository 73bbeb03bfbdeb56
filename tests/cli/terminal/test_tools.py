"""`quire chat --tools demo`: calls are shown, run and answered, whatever a model writes."""

from __future__ import annotations

import argparse
import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli.client.served import Served
from quire.cli.main import main
from quire.cli.sampling_flags import add_sampling_flags, add_server_flags
from quire.cli.terminal.conversation import MAX_ROUNDS
from quire.cli.tools.calls import MAX_CALLS, run_calls
from quire.cli.tools.demo import TOOLS, run_tool
from tests.server.conftest import Running

Capture = pytest.CaptureFixture[str]
Delta = dict[str, Any]


def call(name: str, arguments: str, index: int = 0) -> list[Delta]:
    """A call as it streams: its head, then its arguments in two pieces."""
    head = {"index": index, "id": f"id-{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    middle = len(arguments) // 2
    rest = [{"index": index, "function": {"arguments": a}} for a in (arguments[:middle], arguments[middle:])]
    return [{"tool_calls": [piece]} for piece in (head, *rest)]


@contextmanager
def scripted(*replies: list[Delta], reason: str = "tool_calls") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these replies in turn, the last one for ever; its URL and the requests that it gets."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            deltas = replies[min(len(requests), len(replies)) - 1]
            ends = reason if any("tool_calls" in delta for delta in deltas) else "stop"
            chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
            chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": ends}]})
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(url: str, *more: str) -> int:
    return main(["chat", "--url", url, "--model", "m", "--tools", "demo", "-q", "What is 12 times 7?", *more])


def results(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


def test_a_call_is_shown_run_and_answered(capfd: Capture) -> None:
    with scripted(call("calculate", '{"expression": "12 * 7"}'), [{"content": "12 * 7 = 84."}]) as (url, requests):
        assert ask(url) == 0
    out, err = capfd.readouterr()
    assert out == "12 * 7 = 84.\n"
    assert err.splitlines() == ['call: calculate {"expression": "12 * 7"}', "result: 84"]
    first, second = requests
    assert first["tools"] == [tool.definition() for tool in TOOLS.values()]
    assert first["tool_choice"] == "auto"
    question, said, result = second["messages"]
    assert question == {"role": "user", "content": "What is 12 times 7?"}
    assert said["tool_calls"][0]["function"] == {"name": "calculate", "arguments": '{"expression": "12 * 7"}'}
    assert result == {"role": "tool", "tool_call_id": "id-0", "content": "84"}


def test_several_calls_of_a_message_are_all_run(capfd: Capture) -> None:
    calls = [{"content": "Let me see."}]
    for index in range(MAX_CALLS + 1):
        calls += call("calculate", json.dumps({"expression": f"{index} + 1"}), index)
    with scripted(calls, [{"content": "Done."}]) as (url, requests):
        assert ask(url) == 0
    assert capfd.readouterr().out == "Let me see.\nDone.\n"
    expected = [str(index + 1) for index in range(MAX_CALLS)]
    assert results(requests[1]) == [*expected, f"error: at most {MAX_CALLS} calls are run"]
    assert requests[1]["messages"][1]["content"] == "Let me see."


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("weather", '{"city": "Oslo"}', "error: there is no tool 'weather'; there are calculate, get_time"),
        ("calculate", '{"expression": "12 *', "error: the arguments are no JSON"),
        ("calculate", '["12 * 7"]', "error: the arguments must look like"),
        ("calculate", '{"expression": "import os"}', "error: this is no arithmetic expression"),
        ("get_time", '{"timezone": "\\u001b[2J"}', "error: there is no time zone"),
    ],
)
def test_mistakes_go_back_to_the_model(name: str, arguments: str, told: str, capfd: Capture) -> None:
    with scripted(call(name, arguments), [{"content": "Sorry."}]) as (url, requests):
        assert ask(url) == 0
    out, err = capfd.readouterr()
    assert out == "Sorry.\n"
    assert told in err
    assert "\x1b" not in err
    (result,) = results(requests[1])
    assert result.startswith(told)
    sent = requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(sent), dict), "servers refuse a history whose arguments are no object"


def test_endless_calls_end(capfd: Capture) -> None:
    with scripted(call("calculate", '{"expression": "1 + 1"}')) as (url, requests):
        assert ask(url) == 0
    assert [request["tool_choice"] for request in requests] == ["auto"] * MAX_ROUNDS + ["none"]
    assert len(results(requests[-1])) == MAX_ROUNDS
    assert f"stopped after {MAX_ROUNDS} rounds of calls" in capfd.readouterr().err


def test_a_call_that_was_cut_is_not_run(capfd: Capture) -> None:
    with scripted(call("calculate", '{"expression": "1 +'), reason="length") as (url, requests):
        assert ask(url) == 0
    assert len(requests) == 1
    assert "call: " not in capfd.readouterr().err


def test_without_tools_none_are_offered(capfd: Capture) -> None:
    with scripted([{"content": "Hi."}]) as (url, requests):
        assert main(["chat", "--url", url, "--model", "m", "-q", "Hello"]) == 0
    assert not {"tools", "tool_choice"} & set(requests[0])
    assert capfd.readouterr().out == "Hi.\n"


def test_a_conversation_with_calls_is_saved_loaded_and_asked_again(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    lines = f"What is 12 times 7?\n/save {file}\n/clear\n/load {file}\n/regenerate\n/save {file}2\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    calls, answer = call("calculate", '{"expression": "12 * 7"}'), [{"content": "84."}]
    with scripted(calls, answer, calls, answer) as (url, requests):
        assert main(["chat", "--url", url, "--model", "m", "--tools", "demo"]) == 0
    assert requests[:2] == requests[2:]
    saved, again = (json.loads(Path(f"{file}{ending}").read_text()) for ending in ("", "2"))
    assert saved == again
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert "4 messages read" in capfd.readouterr().err


def test_other_tools_are_refused(capfd: Capture) -> None:
    assert main(["chat", "--tools", "browser", "-q", "Hello"]) == 2
    assert "--tools 'browser': there is only demo, which has calculate and get_time" in capfd.readouterr().err


GREEDY = ["--tools", "demo", "--temperature", "0", "-q"]


@pytest.mark.parametrize("where", ["served", "in process"])
def test_the_embedded_model_answers_while_tools_are_offered(where: str, server: Running, capfd: Capture) -> None:
    url = ["--url", server.url] if where == "served" else []
    assert main(["chat", *url, *GREEDY, "What is a KV cache?"]) == 0
    out, err = capfd.readouterr()
    assert "cache" in out
    assert "call: " not in err


def test_a_real_server_reads_the_calls_and_takes_the_results(server: Running) -> None:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    add_sampling_flags(parser)
    args = parser.parse_args(["--url", server.url, "--temperature", "0", "-n", "100"])
    served = Served(args, None, [tool.definition() for tool in TOOLS.values()])
    must = {"tool_choice": {"type": "function", "function": {"name": "get_time"}}}
    messages: list[Any] = [{"role": "user", "content": "What time is it in Oslo?"}]
    called = served.chat(messages, must, lambda _: None, True)
    assert [call.name for call in called.tool_calls] == ["get_time"]
    assert set(json.loads(called.tool_calls[0].arguments)) == {"timezone"}
    assert (called.text, called.finish_reason) == ("", "tool_calls")
    messages += run_calls(called, run_tool)
    answer = served.chat(messages, {}, lambda _: None, False)
    assert answer.tool_calls == []
    assert answer.text
    assert answer.num_prompt_tokens > called.num_prompt_tokens


def test_a_model_without_tools_in_its_template_is_refused(capfd: Capture, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert main(["chat", "--chat-template", str(template), "--tools", "demo", "-q", "Hello"]) != 0
    assert "tools: the chat template of this model does not read them" in capfd.readouterr().err
