"""Limits of the control groups that this process is in, versions 2 and 1.

A group's limits hold for all groups inside it, so each value is looked up from the process's own group up to the root.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = "sys/fs/cgroup"


def cpu_quota(root: Path) -> float | None:
    """CPUs that the process may keep busy; None without a limit."""
    quotas = [_quota(directory) for directory in _directories(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(root: Path) -> tuple[int, int] | None:
    """(bytes that a group may use, bytes that it uses beside cached files), of the group that has the fewest left; None
    without a limit."""
    found = [group for directory in _directories(root, "memory") if (group := _memory(directory)) is not None]
    return min(found, key=lambda group: group[0] - group[1], default=None)


def _quota(directory: Path) -> float | None:
    """Of one group; None where there is no limit: "max" or -1."""
    quota, _, period = _line(directory / "cpu.max").partition(" ")
    if not quota:
        quota, period = _line(directory / "cpu.cfs_quota_us"), _line(directory / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _memory(directory: Path) -> tuple[int, int] | None:
    """Of one group; see `memory_limit`."""
    for most, current in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = _line(directory / most), _line(directory / current)
        if limit.isdigit():
            return int(limit), max(0, int(used) - _cached(directory)) if used.isdigit() else 0
    return None


def _cached(directory: Path) -> int:
    """Bytes of files that a group keeps, and those inside it."""
    stat = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
    own = (stat.get(f"total_{name}", stat.get(name, "0")) for name in ("inactive_file", "active_file"))
    return sum(int(size) for size in own)


def _directories(root: Path, controller: str) -> Iterator[Path]:
    """Of the process's groups that have a controller, and of those around them.

    In a container the names may be those outside of it; then only the root is there, which is the container's group.
    """
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        controllers, _, name = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / MOUNT / controllers
        group = mount / name.lstrip("/")
        yield from (place for place in (group, *group.parents) if place.is_relative_to(mount))


def _line(path: Path) -> str:
    return _read(path).partition("\n")[0].strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
