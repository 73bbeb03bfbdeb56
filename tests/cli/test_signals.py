"""Signals end a command at every moment of its start, and leave a library that can be used again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT = 60
STARTS_WITHIN_S = 2.5
COMMANDS = {
    "run": ["run", "--raw", "import os", "--max-tokens", "1000"],
    "chat": ["chat", "-q", "hello", "--max-tokens", "400"],
    "complete": ["complete", "-q", "x", "--url", "http://192.0.2.1:9"],
    "env": ["env"],
    "completion": ["completion", "bash"],
    "replay": ["replay", "-"],
    "bench latency": ["bench", "latency"],
    "bench throughput": ["bench", "throughput"],
    "bench startup": ["bench", "startup"],
    "bench serve": ["bench", "serve", "--ready-check-timeout-sec", "60", "--port", "9"],
    "run-batch": ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--overwrite"],
    "serve": ["serve", "--port", "0"],
    "serve, two fronts": ["serve", "--port", "0", "--api-server-count", "2"],
}
DRAINS = {"serve", "serve, two fronts"}


def hear_signals() -> None:
    """In a child: where the tests run in the background, the shell has them ignore SIGINT, and nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(directory: Path, name: str) -> subprocess.Popen[bytes]:
    request = '{"custom_id": "%d", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 200}}\n'
    (directory / "in.jsonl").write_text("".join(request % number for number in range(200)))
    return subprocess.Popen(
        [sys.executable, "-m", "quire.cli.main", *COMMANDS[name]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        start_new_session=True,
        preexec_fn=hear_signals,
    )


def wait_until_handled(process: subprocess.Popen[bytes]) -> None:
    """Until the command's first line has run: before, signals are the interpreter's own."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2]
        if caught and int(caught.split()[0], 16) >> (signal.SIGHUP - 1) & 1:  # nothing: it has ended
            return
        time.sleep(0.001)


def processes_in(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def assert_ends(directory: Path, name: str, number: signal.Signals, delay_s: float, times: int = 1) -> int:
    """Send a signal so long after the start; the status. Whatever is printed is no traceback, and nothing stays."""
    process = start(directory, name)
    try:
        wait_until_handled(process)
        time.sleep(delay_s)
        if process.poll() == 0:  # it was quicker
            process.communicate()
            return 128 + number
        for _ in range(times):
            process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT)
        assert b"Traceback" not in out + err, err.decode()
        deadline = time.monotonic() + TIMEOUT
        while processes_in(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes_in(process.pid) == []
    finally:
        process.kill()
        process.wait()
    return process.returncode


def allowed(name: str, number: signal.Signals) -> set[int]:
    """A command that was quicker than the signal ended as usual; a server drains and ends with 0."""
    usual = {0, 1, 2} if name in ("env", "completion", "replay", "complete", "bench serve") else set()
    return {128 + number, *usual, *({0} if name in DRAINS else ())}


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.4, 0.6])
def test_ctrl_c_ends_run_at_any_moment(tmp_path: Path, delay_s: float) -> None:
    assert assert_ends(tmp_path, "run", signal.SIGINT, delay_s) == 130


def test_ctrl_c_ends_an_answer_that_has_begun(tmp_path: Path) -> None:
    process = start(tmp_path, "run")
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 1)
    while len(begun) <= len(b"import os"):
        begun += os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT)
    assert ((begun + out)[:9], out[-1:], process.returncode) == (b"import os", b"\n", 130)
    assert err.startswith(b"model: quire-tiny")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_run_with_their_number(tmp_path: Path, number: signal.Signals) -> None:
    assert assert_ends(tmp_path, "run", number, 0.3) == 128 + number


@pytest.mark.parametrize("name", ["bench startup", "run-batch", "serve, two fronts"])
def test_a_command_with_processes_leaves_none(tmp_path: Path, name: str) -> None:
    assert assert_ends(tmp_path, name, signal.SIGINT, 0.6) in allowed(name, signal.SIGINT)


def test_a_second_signal_is_harmless(tmp_path: Path) -> None:
    assert assert_ends(tmp_path, "run", signal.SIGINT, 0.3, times=3) == 130


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    command = f"trap '' HUP; exec {sys.executable} -m quire.cli.main run x --max-tokens 2"
    process = subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while b"quire.cli.main" not in Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200]:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGHUP)
    assert b"Traceback" not in process.communicate(timeout=TIMEOUT)[1]
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_on_every_signal(tmp_path: Path, name: str, number: signal.Signals) -> None:
    for delay_s in (0.0, 0.2, 0.6, 1.2, 2.5):
        assert assert_ends(tmp_path, name, number, delay_s) in allowed(name, number), delay_s


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_ends_at_many_moments(tmp_path: Path, number: signal.Signals) -> None:
    for index in range(50):
        assert assert_ends(tmp_path, "run", number, STARTS_WITHIN_S * index / 50) == 128 + number


LIBRARY = """
import os, signal, sys, threading
from quire import LLM

def interrupted(delay_s):
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        llm = LLM()
        timer.join()
        for _ in range(10**6):
            pass
    except KeyboardInterrupt:
        print("interrupted")

for delay_s in map(float, sys.argv[1:]):
    interrupted(delay_s)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(len(LLM().generate("import os", {"max_tokens": 3, "temperature": 0})[0].outputs[0].token_ids))
sys.stdout.flush()
"""


@pytest.mark.parametrize("first_s", [0.02, 0.3, 0.9])
def test_an_interrupted_engine_can_be_made_again(first_s: float) -> None:
    delays = [first_s, 0.0, 0.01, 0.03, 0.06]
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, *map(str, delays)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "QUIRE_LOG_LEVEL": "ERROR"},
        check=False,
        preexec_fn=hear_signals,
    )
    assert done.stdout.split() == ["interrupted"] * len(delays) + ["3"]
    assert "Traceback" not in done.stderr
