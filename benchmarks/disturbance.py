"""How much of the CPUs other processes took while one engine ran. Linux alone."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
NUM_BUSY = 3
"""Of the columns of /proc/stat: user, nice, system. Time that a host takes away is in none of them."""


@dataclass(frozen=True)
class Reading:
    """CPU time in ticks since the machine, or the processes, started."""

    all: int
    own: int
    """Of a process and its descendants."""

    def others_since(self, before: Reading, seconds: float) -> float:
        """The share of one CPU that processes outside took in the `seconds` between two readings."""
        ticks = (self.all - before.all) - (self.own - before.own)
        return max(0.0, ticks / os.sysconf("SC_CLK_TCK") / seconds)


def read(process_id: int) -> Reading:
    """Now, with this process as the one whose time is its own."""
    line = (PROC / "stat").read_text().split("\n", 1)[0]
    return Reading(sum(map(int, line.split()[1 : 1 + NUM_BUSY])), _of_family(process_id))


def _of_family(process_id: int) -> int:
    """Ticks of a process, of its descendants, and of those of them that ended and were waited for."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in PROC.glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(path.parent.name)
        ticks[number] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(number)
    total, waiting = 0, [process_id]
    while waiting:
        number = waiting.pop()
        total += ticks.get(number, 0)
        waiting += children[number]
    return total
