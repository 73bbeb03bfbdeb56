"""What a CPU offers this process: cores, memory, instruction sets. Reads the system's own files; imports no torch."""

from __future__ import annotations

import importlib
import math
import os
from importlib import metadata
from pathlib import Path

from quire import envs
from quire.config.engine import Capabilities

BLOCK_SIZE = 32
"""Matrix tiles on CPU are 32 tokens deep."""
ROOT = Path("/")
"""Where `proc` and `sys` are mounted; tests look elsewhere."""
ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may keep busy: its affinity, capped by the control group's quota."""
    affinity = _allowed_cores()
    quota, _, period = _first_line(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        affinity = min(affinity, max(1, math.floor(int(quota) / int(period))))
    return max(1, affinity)


def _allowed_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory(root: Path = ROOT) -> tuple[int, int]:
    """(total, available) bytes, within the control group's limit. Files that are only cached count as available."""
    fields = _numbers(root / "proc/meminfo")
    total = 1024 * fields.get("MemTotal:", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = 1024 * fields["MemAvailable:"] if "MemAvailable:" in fields else total
    limit, used = _first_line(root / "sys/fs/cgroup/memory.max"), _first_line(root / "sys/fs/cgroup/memory.current")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        stat = _numbers(root / "sys/fs/cgroup/memory.stat")
        cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        available = min(available, total - max(0, int(used) - cached) if used.isdigit() else total)
    return total, max(0, available)


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """Those of interest among the flags the processor reports."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            return tuple(flag for flag in ISA_FLAGS if flag in flags)
    return ()


def best_ops() -> tuple[str, str]:
    """(name, reason) of the best op implementation that runs here."""
    wanted = envs.get("QUIRE_OPS")
    if wanted != "auto":
        return wanted, "set by QUIRE_OPS"
    try:
        library = importlib.import_module("quire.ops.cpu.library")
    except ModuleNotFoundError:
        return "reference", "the native kernels are not installed; steps run several times slower"
    problem: str | None = library.unavailable_reason()
    if problem is not None:
        return "reference", f"{problem}; steps run several times slower"
    return "cpu", f"native kernels, {library.isa()}"


def capabilities() -> Capabilities:
    """Everything `resolve` needs to know about this machine."""
    total, available = memory()
    ops, reason = best_ops()
    library = importlib.import_module("quire.ops.cpu.library") if ops == "cpu" else None
    return Capabilities(
        name="cpu",
        device_type="cpu",
        num_cores=usable_cores(),
        total_memory=total,
        available_memory=available,
        block_size=BLOCK_SIZE,
        ops=ops,
        ops_reason=reason,
        ops_isa="" if library is None else library.isa(),
        ops_digest="" if library is None else library.digest(),
        torch=metadata.version("torch"),
        isa=instruction_sets(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first_line(path: Path) -> str:
    return _read(path).partition("\n")[0].strip()


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in _read(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
