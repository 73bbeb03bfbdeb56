"""What a CPU offers this process: cores, memory, instruction sets. Reads the system's own files; imports no torch."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from pathlib import Path

from quire import envs
from quire.config.engine import Capabilities
from quire.platforms.control_groups import memory_limit
from quire.platforms.cores import ROOT, usable_cores
from quire.platforms.platform import Platform

BLOCK_SIZE = 32
"""Matrix tiles on CPU are 32 tokens deep."""
X86_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "asimddp", "bf16", "i8mm", "sve")
ISA_FLAGS = X86_FLAGS + ARM_FLAGS


def memory(root: Path = ROOT) -> tuple[int, int]:
    """(total, available) bytes, within the control group's limit. Files that are only cached count as available."""
    fields = _numbers(root / "proc/meminfo")
    total = 1024 * fields.get("MemTotal:", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = 1024 * fields["MemAvailable:"] if "MemAvailable:" in fields else total
    group = memory_limit(root)
    if group is not None and group[0] < total:
        total, used = group
        available = min(available, total - used)
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


PLATFORM = Platform(why_not=lambda: None, capabilities=capabilities)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in _read(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
