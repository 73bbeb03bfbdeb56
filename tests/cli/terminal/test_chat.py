"""`quire chat` on a terminal (a pseudo-terminal here) and from a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.terminal.conversation import MAX_SAVED_BYTES
from quire.cli.terminal.markdown import split_blocks

TIMEOUT = 60
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
PROMPT = ">>>"
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, home: Path, *argv: str) -> None:
        self._leader, follower = pty.openpty()
        env = {**os.environ, "HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        env.pop("XDG_STATE_HOME", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quire.cli.main", *argv],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=home,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(follower)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def wait_for(self, text: str) -> str:
        """What is on the screen up to `text`, since the last call."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            plain = ESCAPES.sub("", self._seen)
            if text in plain:
                before, _, self._seen = plain.partition(text)
                return before
            assert time.monotonic() < deadline, f"no {text!r} in {plain[-2000:]!r}"
            if select.select([self._leader], [], [], 0.2)[0]:
                self._seen += self._read()

    def end(self) -> tuple[int, str]:
        """(exit status, what is left on the screen)."""
        while piece := self._read():
            self._seen += piece
        return self.process.wait(TIMEOUT), ESCAPES.sub("", self._seen)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def _read(self) -> str:
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # the other end is closed
            return ""
        return data.decode(errors="replace")


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, "chat", "--temperature", "0", "-n", "24")
    try:
        terminal.wait_for(PROMPT)
        yield terminal
    finally:
        terminal.close()


def ask(terminal: Terminal, line: str) -> str:
    """Send a line; what comes until the next prompt."""
    terminal.type(f"{line}\r")
    terminal.wait_for(f"{line[-10:]}\n")  # drawn a last time
    return terminal.wait_for(PROMPT)


def saved(terminal: Terminal, home: Path, name: str = "talk.json") -> dict[str, object]:
    ask(terminal, f"/save {name}")
    deadline = time.monotonic() + TIMEOUT
    while not (home / name).exists():  # what was on the screen was the prompt of the question, drawn again
        assert time.monotonic() < deadline
        ask(terminal, f"/save {name}")
    content: dict[str, object] = json.loads((home / name).read_text())
    return content


def test_a_conversation_is_asked_set_shown_saved_and_loaded(chat: Terminal, tmp_path: Path) -> None:
    answer = ask(chat, "What is a KV cache?")
    assert "cache" in answer
    assert "/regenerate" in ask(chat, "/help")
    assert "did you mean '/regenerate'" in ask(chat, "/regenrate")
    assert "temperature must be in [0, 2], got 9" in ask(chat, "/set temperature 9")
    assert "max_tokens = 5" in ask(chat, "/set max_tokens 5")
    assert "Be brief." not in ask(chat, "/show")
    ask(chat, "/system Be brief.")
    shown = ask(chat, "/show")
    assert "Be brief." in shown
    assert "max_tokens = 5" in shown
    content = saved(chat, tmp_path)
    assert [message["role"] for message in content["messages"]] == ["user", "assistant"]  # type: ignore[attr-defined]
    assert (content["system"], content["settings"]) == ("Be brief.", {"max_tokens": 5})
    ask(chat, "/clear")
    assert saved(chat, tmp_path, "empty.json")["messages"] == []
    assert "2 messages read" in ask(chat, "/load talk.json")
    assert saved(chat, tmp_path, "again.json") == content
    ask(chat, "/regenerate")
    ask(chat, "/set max_tokens default")
    assert len(saved(chat, tmp_path, "more.json")["messages"]) == 2  # type: ignore[arg-type]
    chat.type("/quit\r")
    assert chat.end()[0] == 0


def test_ctrl_c_clears_the_line_and_ctrl_d_leaves(chat: Terminal) -> None:
    chat.type("this is never asked")
    chat.wait_for("never asked")
    chat.type(CTRL_C)
    chat.wait_for(PROMPT)
    assert "messages: 0" in ask(chat, "/show")
    chat.type(CTRL_D)
    status, rest = chat.end()
    assert (status, "Traceback" in rest) == (0, False)


def test_pasted_lines_are_one_question_and_the_history_has_it(chat: Terminal, tmp_path: Path) -> None:
    chat.type("\x1b[200~first line\nsecond line\x1b[201~")
    chat.wait_for("second line")
    chat.type("\r")
    chat.wait_for(PROMPT)
    (question, _) = saved(chat, tmp_path)["messages"]  # type: ignore[misc]
    assert question == {"role": "user", "content": "first line\nsecond line"}
    chat.type(UP + UP)
    chat.wait_for("second line")
    chat.type(CTRL_C)
    chat.wait_for(PROMPT)
    chat.type(CTRL_D)
    assert chat.end()[0] == 0
    history = tmp_path / ".local/state/quire/chat_history"
    assert "+first line" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "chat", "--plain", "-n", "900", "--no-history")
    try:
        terminal.wait_for(PROMPT)
        ask(terminal, "/set ignore_eos true")
        ask(terminal, "/stats")
        terminal.type("Tell me a long story\r")
        terminal.wait_for("long story\n")
        terminal.wait_for("e")  # of the answer
        terminal.process.send_signal(signal.SIGINT)
        assert "(abort)" in terminal.wait_for(PROMPT)
        assert "messages: 2" in ask(terminal, "/show")
        terminal.type(CTRL_D)
        assert terminal.end()[0] == 0
        assert not (tmp_path / ".local").exists()
    finally:
        terminal.close()


def test_run_with_a_model_opens_the_chat(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "run", "quire-tiny", "-n", "8")
    try:
        assert "model: quire-tiny" in terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.end()[0] == 0
    finally:
        terminal.close()


def test_commands_work_from_a_pipe(tmp_path: Path) -> None:
    lines = "/system Be brief.\n/set max_tokens 3\nhello\n/save talk.json\n/nothing\n/load nothing.json\n/regenerate\n"
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "chat", "--temperature", "0"],
        input=lines,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    first, second = done.stdout.splitlines()
    content = json.loads((tmp_path / "talk.json").read_text())
    assert content["messages"][1]["content"] == first == second
    assert "/nothing is no command" in done.stderr
    assert "nothing.json: No such file" in done.stderr
    assert ">" not in done.stdout


def test_a_chat_has_one_answer_and_takes_no_setting_for_others(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text('{"messages": [], "settings": {"n": 2}}')
    lines = "/set n 2\n/set use_beam_search true\n/set detokenize false\n/load talk.json\n/show\n"
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "chat"],
        input=lines,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    for name in ("n", "use_beam_search", "detokenize"):
        assert f"quire: {name} has no place in a chat" in done.stderr
    assert "talk.json holds no conversation" in done.stderr
    assert "settings: the defaults" in done.stderr


def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"messages": [{"role": 1}]}')
    with (tmp_path / "large.json").open("wb") as large:
        large.truncate(MAX_SAVED_BYTES + 1)
    files = "".join(
        f"/load {name}\n" for name in ("bad.json", "large.json", "/dev/zero", "none.json", "~nobody-here/x", "")
    )
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "chat"],
        input=f"{files}/save ~nobody-here/x\n/save a\0b\n/show\n/set nothing 3\n/set temperature\n/regenerate\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    assert "bad.json holds no conversation" in done.stderr
    assert f"large.json: it has more than {MAX_SAVED_BYTES} bytes" in done.stderr
    assert "/dev/zero: it is no regular file" in done.stderr
    assert "none.json: No such file or directory" in done.stderr
    assert "no file given: it is no regular file" in done.stderr
    assert done.stderr.count("~nobody-here/x: Could not determine home directory.") == 2
    assert "embedded null" in done.stderr
    assert "messages: 0" in done.stderr
    assert "SamplingParams has no parameter 'nothing'" in done.stderr
    assert "there is no question to answer again" in done.stderr


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~\n```\n\n~~~\n\n", "~~~\n```\n\n~~~\n\n"),
        ("a\n", ""),
    ],
)
def test_blocks_end_at_empty_lines_outside_code(text: str, finished: str) -> None:
    assert split_blocks(text) == (finished, text[len(finished) :])
