"""What can be known of another process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from quire.utils.process import describe_exit, num_oom_kills, raise_descriptor_limit, thread_states


@pytest.mark.parametrize(
    ("returncode", "text"),
    [(0, "exited with status 0"), (3, "exited with status 3"), (-11, "was killed by SIGSEGV"), (-99, "signal 99")],
)
def test_exit_in_words(returncode: int, text: str) -> None:
    assert text in describe_exit(returncode)


def test_states_of_threads() -> None:
    assert "R" in thread_states(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as child:
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while thread_states(child.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert thread_states(child.pid) == "T"
        child.kill()
    assert thread_states(child.pid) == ""


def test_kills_for_want_of_memory_are_counted() -> None:
    assert num_oom_kills() >= 0


def test_descriptors_are_raised_to_what_is_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_descriptor_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft > 256
        assert hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


CHILD = """
import os, subprocess, sys, time
child = "import sys, time; from quire.utils.process import die_with_parent; die_with_parent(int(sys.argv[1]))"
child += "; print('tied', flush=True); time.sleep(1000)"
process = subprocess.Popen([sys.executable, "-c", child, str(os.getpid())], stdout=subprocess.PIPE, text=True)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(1000)
"""


def test_a_child_dies_with_its_parent_even_when_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    deadline = time.monotonic() + 20
    while thread_states(pid).strip("Z") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert thread_states(pid).strip("Z") == ""


def test_a_child_that_lost_its_parent_before_it_could_be_tied_exits() -> None:
    code = "from quire.utils.process import die_with_parent; die_with_parent(1 << 30); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
