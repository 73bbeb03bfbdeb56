"""Which cores this process may use, and the memory beside them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
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


def memory_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """NUMA nodes that have some of this process's cores, and memory that it may take; ascending, () where the system
    does not say.
    """
    allowed, cpus = _allowed_memory(root), allowed_cpus()
    numbers = {node: _numbers(path / "cpulist") for node, path in _nodes(root) if allowed is None or node in allowed}
    return tuple(sorted(node for node, own in numbers.items() if own & cpus))


def _nodes(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.glob("sys/devices/system/node/node[0-9]*"):
        yield int(path.name.removeprefix("node")), path


def _allowed_memory(root: Path) -> set[int] | None:
    """The nodes whose memory the control groups leave to this process; None where they do not say."""
    try:
        status = (root / "proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    lists = (line.partition(":")[2] for line in status.splitlines() if line.startswith("Mems_allowed_list:"))
    return next((_parsed(text) for text in lists), None)


def _numbers(path: Path) -> set[int]:
    """Those of a list as the kernel writes them: "0-3,8"; none of a file that is not there."""
    try:
        return _parsed(path.read_text(encoding="ascii"))
    except OSError:
        return set()


def _parsed(text: str) -> set[int]:
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _siblings(cpu: int, root: Path) -> str:
    """The logical CPUs of the core that one belongs to."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)
