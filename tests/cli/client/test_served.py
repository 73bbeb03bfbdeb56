"""`quire chat` and `quire complete` against a server: what they print is what the server writes."""

from __future__ import annotations

import io
import sys

import pytest

from quire.cli.main import main
from tests.server.conftest import Running, Serve

Capture = pytest.CaptureFixture[str]
GREEDY = ["--temperature", "0", "--max-tokens", "6"]


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))


def test_complete_prints_the_prompt_and_what_follows(server: Running, capfd: Capture) -> None:
    assert main(["complete", "--url", server.url, "-q", "import os", "--stats", *GREEDY]) == 0
    out, err = capfd.readouterr()
    choice = server.post("/v1/completions", prompt="import os", temperature=0, max_tokens=6).json()["choices"][0]
    assert out == f"import os{choice['text']}\n"
    assert "6 output tokens (length)" in err


def test_complete_takes_every_line_as_a_prompt(
    server: Running, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "import os\n\nimport sys\n")
    assert main(["complete", "--url", server.url, *GREEDY]) == 0
    out = capfd.readouterr().out
    assert "import os" in out
    assert "import sys" in out


def test_chat_remembers_the_conversation(server: Running, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, "What is a KV cache?\nWhy?\n/exit\n")
    assert main(["chat", "--url", f"{server.url}/v1", "--system-prompt", "Be brief.", *GREEDY]) == 0
    messages = [{"role": "system", "content": "Be brief."}]
    expected = ""
    for question in ("What is a KV cache?", "Why?"):
        messages.append({"role": "user", "content": question})
        reply = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=6).json()
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        expected += messages[-1]["content"] + "\n"
    assert capfd.readouterr().out == expected


def test_a_question_that_is_refused_exits_with_1(server: Running, capfd: Capture) -> None:
    for command in ("chat", "complete"):
        assert main([command, "--url", server.url, "-q", "word " * 5000]) == 1
        assert "maximum context length is" in capfd.readouterr().err


def test_keys_are_sent(serve: Serve, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(api_key=("secret",)) as guarded:
        ask = ["complete", "--url", guarded.url, "-q", "import os", *GREEDY]
        assert main(ask) == 2
        assert "401 Unauthorized: No API key given. Send one as" in capfd.readouterr().err
        assert main([*ask, "--api-key", "wrong"]) == 2
        assert "401 Unauthorized: Incorrect API key" in capfd.readouterr().err
        assert main([*ask, "--api-key", "secret"]) == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert main(ask) == 0
        monkeypatch.setenv("QUIRE_API_KEY", "wrong")
        assert main(ask) == 2
        monkeypatch.setenv("QUIRE_API_KEY", "secret, another")
        assert main(ask) == 0


WRONG = {
    "no model of that name": (["complete", "--model", "gpt"], 1, ["404", "`gpt` does not exist"]),
    "a flag of the engine": (["chat", "--dtype", "float32"], 2, ["--dtype has no effect with --url"]),
    "temperature": (["chat", "--temperature", "9"], 1, ["temperature must be in [0, 2], got 9"]),
    "header": (["chat", "--api-key", "a\nb"], 2, ["header 'Authorization' must hold printable ASCII"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_answered_in_one_line(name: str, server: Running, capfd: Capture) -> None:
    argv, expected, parts = WRONG[name]
    assert main([*argv, "--url", server.url, "-q", "hi"]) == expected
    err = capfd.readouterr().err
    assert err.strip().count("\n") == 0
    for part in parts:
        assert part in err


def test_a_server_that_is_not_there_is_said(capfd: Capture) -> None:
    assert main(["complete", "--url", "http://127.0.0.1:1", "-q", "hi"]) == 2
    assert "cannot connect to http://127.0.0.1:1" in capfd.readouterr().err
    assert main(["chat", "--api-key", "x", "-q", "hi"]) == 2
    assert "--api-key has no effect without --url" in capfd.readouterr().err
