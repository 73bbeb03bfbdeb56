"""A thread that a process cannot do without ends the process when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.utils.threads import BACKGROUND_NICENESS, THREAD_FAILED_STATUS, give_way, start_essential

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
