"""Which cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from quire.platforms.control_groups import cpu_quota

ROOT = Path("/")
"""Where `proc` and `sys` are mounted; tests look elsewhere."""


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may keep busy: those of its affinity, capped by the control group's quota.

    Two hyper-threads of one core share its vector units and its path to memory: a second thread there only disturbs.
    Slower cores count as well, for work is handed out in pieces small enough that nobody waits long for the last one.
    """
    cores = {_siblings(cpu, root) for cpu in allowed_cpus()}
    quota = cpu_quota(root)
    return max(1, min(len(cores), len(cores) if quota is None else math.floor(quota)))


def allowed_cpus() -> set[int]:
    """Logical CPUs of this process's affinity."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return set(range(os.cpu_count() or 1))


def _siblings(cpu: int, root: Path) -> str:
    """The logical CPUs of the core that one belongs to."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)
