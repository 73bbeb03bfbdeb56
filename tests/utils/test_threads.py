"""A thread that a process cannot do without ends the process when it fails."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.utils.threads import (
    BACKGROUND_NICENESS,
    PROMPT_SLICE_NS,
    THREAD_FAILED_STATUS,
    give_way,
    start_essential,
    wake_promptly,
)

PROGRAM = """
import time
from quire.utils.threads import start_essential

def run():
    {body}

start_essential("quire-some", run)
time.sleep(100)
"""


@pytest.mark.parametrize("body", ["raise RuntimeError('lost')", "raise SystemExit(0)", "[][0]"])
@pytest.mark.parametrize("is_disk_full", [False, True])
def test_a_thread_that_fails_ends_its_process_with_a_line_in_the_log(
    tmp_path: Path, body: str, is_disk_full: bool
) -> None:
    path = Path("/dev/full") if is_disk_full else tmp_path / "log"
    with path.open("w") as log:
        done = subprocess.run([sys.executable, "-c", PROGRAM.format(body=body)], stderr=log, timeout=60, check=False)
    assert done.returncode == THREAD_FAILED_STATUS
    if not is_disk_full:
        assert "thread quire-some failed" in path.read_text()


def test_no_thread_of_quire_can_die_unnoticed() -> None:
    root = Path(__file__).parents[2] / "quire"
    bare = [
        f"{path.relative_to(root)}:{number}"
        for path in root.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "Thread(target=" in line
    ]
    assert [place.partition(":")[0] for place in bare] == ["utils/threads.py"], bare


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
def test_only_the_thread_that_gives_way_is_niced() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, found = niceness(), []

    def run() -> None:
        give_way()
        found.append(niceness())

    start_essential("quire-some", run).join()
    assert found == [max(before, BACKGROUND_NICENESS)]
    assert niceness() == before


def slice_ns(task_id: int) -> int:
    """The slice that the scheduler gives a thread."""
    attr = ctypes.create_string_buffer(48)
    assert not ctypes.CDLL(None).syscall(315 if platform.machine() == "x86_64" else 275, task_id, attr, 48, 0)
    return int(struct.unpack("=IIQiIQQQ", attr.raw)[5])


def has_slices() -> bool:
    """Whether threads can have slices of their own: Linux 6.12, on machines that `wake_promptly` knows."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    return tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)


@pytest.mark.skipif(not has_slices(), reason="threads have slices of their own on Linux 6.12 and newer")
def test_only_the_thread_that_wakes_promptly_has_a_short_slice() -> None:
    own, found = threading.get_native_id, []

    def run() -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, own())
        wake_promptly()
        found.append(slice_ns(own()))
        assert os.getpriority(os.PRIO_PROCESS, own()) == niceness
        start_essential("quire-other", lambda: found.append(slice_ns(own()))).join()
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        found.append(slice_ns(child.pid))
        child.communicate(b"\n")

    start_essential("quire-usual", lambda: found.append(slice_ns(own()))).join()  # this thread may be a loop's
    start_essential("quire-some", run).join()
    usual, prompt, *others = found
    assert prompt == PROMPT_SLICE_NS < usual
    assert others == [usual, usual]
