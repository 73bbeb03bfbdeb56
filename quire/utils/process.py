"""What a process can know of another, and the tie between a parent and its children."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from pathlib import Path

MAX_DESCRIPTORS = 1 << 16
"""More would cost memory and serve nobody."""
_PR_SET_PDEATHSIG = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, niceness, priority, and three times, of which the first is a thread's slice."""
_RESET_ON_FORK = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exits at once if it is too late.

    A process that is stopped or busy cannot see its parent go, but it can be killed.
    """
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def use_slice(slice_ns: int, niceness: int) -> None:
    """Give the calling thread, of an ordinary policy and this niceness, a slice of its own, where Linux has that.

    Threads and processes that it starts have the usual one, and no negative niceness.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if os.uname().sysname == "Linux" and number is not None:
        attr = _SCHED_ATTR.pack(_SCHED_ATTR.size, 0, _RESET_ON_FORK, niceness, 0, slice_ns, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attr, 0)


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files and connections as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def thread_states(pid: int) -> str:
    """One letter per thread, as in proc(5): R runs or could, S and D sleep, T is stopped; empty when unknown."""
    states = ""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            states += (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        pass
    return states


def num_storage_bytes() -> int:
    """Bytes that this process has had read from storage or will have written to it; 0 where the system does not say.

    Pages of mapped files count when they are read, so a library or a checkpoint on a slow disk can be seen to load.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["read_bytes"]) + int(counts["write_bytes"])
    except (OSError, KeyError, ValueError):
        return 0


def memory_status() -> dict[str, int]:
    """Bytes of this process by the kernel's names, such as VmHWM and RssAnon; empty where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}


def num_oom_kills() -> int:
    """Processes of this machine that the kernel has killed for want of memory; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def describe_exit(returncode: int) -> str:
    """How a process ended, for people."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
