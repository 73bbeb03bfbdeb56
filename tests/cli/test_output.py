"""Output that cannot be written ends a command with one line and status 1; secrets are never output."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.output import check_writable, write_json
from quire.cli.terminal.answer import write_plain
from quire.cli.terminal.markdown import create_display
from quire.errors import ConfigError
from quire.server.settings import ServerSettings
from tests.server.conftest import Running

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
WRITERS = {
    "env": ["env"],
    "env --json": ["env", "--json"],
    "completion": ["completion", "zsh"],
    "--help": ["--help"],
    "serve --help": ["serve", "--help"],
    "--version": ["--version"],
    "run": ["run", "import os", "--max-tokens", "3"],
    "chat": ["chat", "-q", "import os", "--max-tokens", "3"],
    "bench latency": ["bench", "latency", "--num-iters", "1", "--output-len", "2"],
    "bench throughput": ["bench", "throughput", "--num-prompts", "2", "--output-len", "2"],
    "bench startup": ["bench", "startup", "--num-iters", "1", "--num-iters-warmup", "0"],
}


def quire(*argv: str, stdout: int) -> tuple[int, str]:
    """(status, what it says on standard error, without the log and the model's name)."""
    env = {**os.environ, "QUIRE_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "quire.cli.main", *argv]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, timeout=120, check=False)
    said = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("model: ")]
    return done.returncode, "".join(said)


def to_full(*argv: str) -> tuple[int, str]:
    with FULL.open("wb") as full:
        return quire(*argv, stdout=full.fileno())


def test_standard_output_that_is_full_is_said_in_one_line() -> None:
    with ThreadPoolExecutor(2) as pool:
        ends = dict(zip(WRITERS, pool.map(lambda name: to_full(*WRITERS[name]), WRITERS), strict=True))
    assert ends == dict.fromkeys(WRITERS, (1, "quire: standard output cannot be written: No space left on device\n"))


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_clients_say_it_too(command: str, server: Running) -> None:
    status, err = to_full(command, "--url", server.url, "-q", "import os", "--max-tokens", "3")
    assert (status, err) == (1, "quire: standard output cannot be written: No space left on device\n")


def test_a_reader_that_has_seen_enough_is_no_error_to_talk_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        for name in ("env", "completion", "--help", "run"):
            assert quire(*WRITERS[name], stdout=writing) == (1, "")
    finally:
        os.close(writing)


def test_closed_streams_lead_nowhere() -> None:
    command = f"exec {sys.executable} -m quire.cli.main env <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_figures_that_cannot_be_stored_name_the_file(kind: str) -> None:
    status, err = quire(*WRITERS[f"bench {kind}"], "--output-json", str(FULL), stdout=subprocess.DEVNULL)
    assert (status, err) == (1, "quire: /dev/full: cannot be written: No space left on device\n")


@pytest.mark.parametrize("command", [["bench", "startup"], ["bench", "latency"]])
def test_a_file_that_cannot_be_written_is_refused_before_time_is_spent(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--output-json", "/no/such/file"]) == 2
    assert capfd.readouterr().err == "quire: --output-json /no/such/file cannot be written: No such file or directory\n"


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    check_writable("--output-json", file)
    assert not file.exists()
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    tmp_path.chmod(0o700)
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ConfigError, match="Is a directory"):
        check_writable("--output-json", tmp_path)


SECRET = "correct-horse-battery"
ESCAPES = "a\x1b]52;c;aGk=\x07b\x9b2Jc\rd\x7f"
"""What a terminal takes for commands: one writes the clipboard, one clears the screen."""
SHOWN = "a\ufffd]52;c;aGk=\ufffdb\ufffd2Jc\ufffdd\ufffd\n\te"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_model_says_is_no_command_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdout, shown in ((Terminal(), SHOWN), (io.StringIO(), f"{ESCAPES}\n\te")):
        monkeypatch.setattr(sys, "stdout", stdout)
        write_plain(f"{ESCAPES}\n\te")
        assert stdout.getvalue() == shown
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with create_display(plain=False) as display:
        display.write(f"{ESCAPES}\n\nmore")
    assert not {"\x07", "\x9b", "\x7f"} & set(terminal.getvalue())
    assert "\x1b]52" not in terminal.getvalue()


def test_messages_are_no_commands_to_the_terminal(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They quote servers and files."""
    directory = tmp_path / ESCAPES
    directory.mkdir()
    assert main(["plan", str(directory)]) == 2
    out, err = capfd.readouterr()
    assert not set("\x1b\x07\x9b\r\x7f") & set(out + err)
    assert "]52;c;" in err


def test_env_says_that_a_secret_is_set_and_not_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", SECRET)
    for flags in ([], ["--json"]):
        assert main(["env", *flags]) == 0
        out, err = capfd.readouterr()
        assert SECRET not in out + err
        assert "set, not shown: Keys that a server" in out


@pytest.mark.parametrize(
    "argv",
    [
        ["complete", "-q", "x", "--url", f"http://user:{SECRET}@127.0.0.1:1"],
        ["chat", "-q", "x", "--url", f"ftp://user:{SECRET}@127.0.0.1:1"],
        ["bench", "serve", "--base-url", f"http://{SECRET}@127.0.0.1:1"],
        ["complete", "-q", "x", "--url", "http://127.0.0.1:1", "--api-key", SECRET],
        ["chat", "-q", "x", "--api-key", SECRET],
        ["serve", "--api-key", f"{SECRET} {SECRET}", "--port", "0"],
        ["serve", "--api-key", SECRET, "--prot", "0"],
    ],
)
def test_no_error_shows_a_secret(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capfd.readouterr()
    assert status == 2
    assert SECRET not in out + err
    assert err.count("\n") == 1


def test_a_file_of_flags_that_cannot_be_read_is_not_quoted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"port: 0\napi-key: [{SECRET}\nhost: x\n")
    assert main(["serve", "--config", str(file)]) == 2
    out, err = capfd.readouterr()
    assert SECRET not in out + err
    assert f"--config {file}: line 3" in err


def test_a_file_of_flags_that_is_missing_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.yaml"
    assert main(["serve", "--config", str(file)]) == 2
    err = capfd.readouterr().err
    assert f"--config {file} cannot be read: No such file or directory. Give a YAML file with flags as keys." in err


@pytest.mark.parametrize("keys", [SECRET, (SECRET, ""), (f"{SECRET}\n",)])
def test_settings_keep_their_keys_to_themselves(keys: Any) -> None:
    assert SECRET not in repr(ServerSettings(api_key=(SECRET,)))
    with pytest.raises(ConfigError) as raised:
        ServerSettings(api_key=keys)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--config", "/dev/zero"],
        ["replay", "/dev/zero"],
        ["complete", "-q", "a", "--url", "http://127.0.0.1:9", "--json-schema", "/dev/zero"],
    ],
)
def test_a_file_without_an_end_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert re.search(r"/dev/zero: it has more than \d+ bytes", capsys.readouterr().err)
