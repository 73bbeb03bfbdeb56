"""An Ollama user: pull, list, show, run, chat, serve, the client, curl, rm."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.cli.terminal.test_chat import CTRL_D, PROMPT, Terminal, ask
from tests.loader.hub_server import Hub, serving
from tests.loader.test_hub import FILES, TINY, Machine
from tests.server.processes.test_processes import Server

NAME, REPOSITORY = "qwen3:0.6b", "Qwen/Qwen3-0.6B"
QUESTION = "What is a KV cache?"
ANSWER = "The KV cache stores the keys and"


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that holds the embedded model under a name that everybody knows."""
    with serving() as hub_:
        hub_.repositories[REPOSITORY] = {name: (TINY / name).read_bytes() for name in (*FILES, "chat_template.jinja")}
        yield hub_


@contextmanager
def environment_of(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's environment in this process, for what starts other processes itself."""
    with monkeypatch.context() as patch:
        for name, value in machine.env.items():
            patch.setenv(name, value)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def test_an_ollama_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub() as server:
        machine = Machine(tmp_path, server)
        pull_and_look(machine)
        run_prompts(machine)
        with environment_of(machine, monkeypatch):
            chat_in_the_terminal(tmp_path)
            serve_the_clients(tmp_path)
        remove(machine)


def pull_and_look(machine: Machine) -> None:
    """`ollama pull`, `list`, `show`."""
    status, out, err = machine.run("list")
    assert (status, [line.split()[0] for line in out.splitlines()]) == (0, ["NAME", "quire-tiny"])
    status, _, err = machine.run("run", "qwen3:600m", QUESTION)
    assert (status, "qwen3:0.6b" in err) == (2, True), "the sizes that there are"
    status, out, err = machine.run("pull", NAME)
    assert status == 0, err
    assert f"pulling {REPOSITORY}" in err
    listed = machine.run("list")[1]
    assert REPOSITORY in listed
    assert NAME in listed
    status, out, _ = machine.run("show", NAME)
    for line in ("LlamaForCausalLM", "6.95 million", "1024 tokens", "memory plan"):
        assert line in out


def run_prompts(machine: Machine) -> None:
    """`ollama run MODEL PROMPT` answers; so does a prompt from a pipe."""
    offline = {"HF_HUB_OFFLINE": "1"}
    status, out, err = machine.run("run", NAME, QUESTION, "--temperature", "0", "-n", "8", **offline)
    assert (status, out) == (0, f"{ANSWER}\n"), err
    assert err == f"model: {NAME} ({REPOSITORY}); answering as in a chat (--raw continues the text)\n"
    status, out, err = machine.run("run", NAME, "--temperature", "0", "-n", "8", stdin=QUESTION, **offline)
    assert (status, out) == (0, f"{ANSWER}\n"), err
    status, out, _ = machine.run("run", NAME, "import os", "--raw", "-n", "4", **offline)
    assert out.startswith("import os")
    status, _, err = machine.run("run", NAME, "x", "--raw", "--system-prompt", "Be brief.", **offline)
    assert (status, "--system-prompt needs a chat" in err) == (2, True)


def chat_in_the_terminal(home: Path) -> None:
    """`ollama run MODEL`: a conversation, a setting, a system prompt, /bye."""
    terminal = Terminal(home, "run", NAME, "--temperature", "0", "-n", "8", "--plain")
    try:
        assert "/help lists the commands, Ctrl-D leaves" in terminal.wait_for(PROMPT)
        assert ANSWER in ask(terminal, QUESTION)
        assert "/regenerate" in ask(terminal, "/?")
        assert "num_ctx" in ask(terminal, "/set parameter num_ctx 4096"), "it says that it does not know it"
        assert "temperature = 0.5" in ask(terminal, "/set parameter temperature 0.5")
        assert "the system prompt is set" in ask(terminal, "/system Be brief.")
        assert "system prompt: Be brief." in ask(terminal, "/show")
        terminal.type("/bye\r")
        assert terminal.end()[0] == 0
    finally:
        terminal.close()


def serve_the_clients(directory: Path) -> None:
    """`ollama serve`: the Python client, what `curl` sends, and a chat in the terminal with the server."""
    served = Server(directory / "log", NAME)
    try:
        served.wait_ready()
        assert f"console: {served.url}/" in served.log.read_text()
        with ollama.Client(host=served.url) as client:
            (model,) = client.list().models
            assert client.show(str(model.model)).details is not None
            message = {"role": "user", "content": QUESTION}
            options = {"temperature": 0, "num_predict": 8}
            parts = client.chat(model=str(model.model), messages=[message], options=options, stream=True)
            assert "".join(part.message.content or "" for part in parts) == ANSWER
            whole = client.generate(model=str(model.model), prompt=QUESTION, options=options)
            assert (whole.response, whole.done_reason, whole.eval_count) == (ANSWER, "length", 8)
            with pytest.raises(
                ollama.ResponseError, match=r"`llama3.2` does not exist. Available: qwen3:0.6b"
            ) as caught:
                client.chat(model="llama3.2", messages=[message])
            assert caught.value.status_code == 404
            with pytest.raises(ollama.ResponseError, match="This server has one model"):
                client.pull("llama3.2")
        ask_with_curl(served.url)
        terminal = Terminal(directory, "chat", "--url", served.url, "--temperature", "0", "-n", "8", "--plain")
        try:
            terminal.wait_for(PROMPT)
            assert ANSWER in ask(terminal, QUESTION)
            terminal.type(CTRL_D)
            assert terminal.end()[0] == 0
        finally:
            terminal.close()
        served.process.terminate()
        assert served.process.wait(60) == 0
    finally:
        served.close()


def ask_with_curl(url: str) -> None:
    """The first example of Ollama's documentation, as it stands there and as it works here."""
    curl = shutil.which("curl")
    if curl is None:
        return
    body = {"model": NAME, "prompt": QUESTION, "stream": False, "options": {"num_predict": 8, "temperature": 0}}

    def post(*more: str) -> Any:
        command = [curl, "-s", f"{url}/api/generate", "-d", json.dumps(body), *more]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    assert post()["response"] == ANSWER
    assert post("-H", "Content-Type: application/json")["response"] == ANSWER


def remove(machine: Machine) -> None:
    """`ollama rm`."""
    status, out, err = machine.run("rm", NAME, "-y")
    assert (status, out) == (0, out), err
    assert re.fullmatch(rf"deleted {REPOSITORY} \(.* MiB\)\n", out)
    assert REPOSITORY not in machine.run("list")[1]
