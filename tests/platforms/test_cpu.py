"""What the system's files say about a machine, inside control groups and out."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.platforms import cpu

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1000 kB\nMemAvailable:    8388608 kB\nHugePages_Total: 0\n"


def machine(root: Path, **files: str) -> Path:
    places = {"meminfo": "proc/meminfo", "cpuinfo": "proc/cpuinfo"}
    for name, text in files.items():
        path = root / places.get(name, f"sys/fs/cgroup/{name.replace('_', '.')}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_control_group_the_machines_own_memory_counts(tmp_path: Path) -> None:
    assert cpu.memory(machine(tmp_path, meminfo=MEMINFO)) == (16 * GIB, 8 * GIB)
    assert cpu.memory(machine(tmp_path, memory_max="max\n", memory_current="5\n")) == (16 * GIB, 8 * GIB)


def test_a_limit_above_the_machines_memory_changes_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, meminfo=MEMINFO, memory_max=f"{32 * GIB}\n", memory_current=f"{20 * GIB}\n")
    assert cpu.memory(root) == (16 * GIB, 8 * GIB)


@pytest.mark.parametrize(
    ("used", "stat", "available"),
    [
        (1 * GIB, "anon 1\n", 3 * GIB),
        (4 * GIB, f"inactive_file {2 * GIB}\nactive_file {GIB}\nfile {4 * GIB}\n", 3 * GIB),
        (5 * GIB, "", 0),
        (1 * GIB, f"inactive_file {2 * GIB}\n", 4 * GIB),
    ],
)
def test_a_control_groups_limit_holds_and_cached_files_do_not_count_as_used(
    tmp_path: Path, used: int, stat: str, available: int
) -> None:
    root = machine(tmp_path, meminfo=MEMINFO, memory_max=f"{4 * GIB}\n", memory_current=f"{used}\n", memory_stat=stat)
    assert cpu.memory(root) == (4 * GIB, available)


def test_a_control_group_is_not_given_more_than_the_machine_has_free(tmp_path: Path) -> None:
    meminfo = MEMINFO.replace("8388608", "1048576")
    root = machine(tmp_path, meminfo=meminfo, memory_max=f"{4 * GIB}", memory_current="0")
    assert cpu.memory(root) == (4 * GIB, 1 * GIB)


def test_the_limit_of_a_group_around_ours_holds_too(tmp_path: Path) -> None:
    root = machine(tmp_path, meminfo=MEMINFO)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/outer/inner\n")
    for group, limit, used in (("outer", 3 * GIB, 2 * GIB), ("outer/inner", 2 * GIB, GIB // 2)):
        directory = root / "sys/fs/cgroup" / group
        directory.mkdir(parents=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.current").write_text(f"{used}\n")
    assert cpu.memory(root) == (3 * GIB, GIB)


def test_control_groups_of_version_1_have_limits(tmp_path: Path) -> None:
    root = machine(tmp_path, meminfo=MEMINFO)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/elsewhere/b\n")
    directory = root / "sys/fs/cgroup/memory"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert cpu.memory(root) == (4 * GIB, 2 * GIB)


def test_without_any_of_these_files_there_is_still_an_answer(tmp_path: Path) -> None:
    total, available = cpu.memory(tmp_path)
    assert 0 < available <= total
    assert cpu.instruction_sets(tmp_path) == ()


def test_instruction_sets_are_read_from_the_processors_flags(tmp_path: Path) -> None:
    text = "processor : 0\nflags\t\t: fpu avx2 avx512f amx_bf16 avx512_vnni_not\nflags : avx512_bf16\n"
    assert cpu.instruction_sets(machine(tmp_path, cpuinfo=text)) == ("avx2", "avx512f", "amx_bf16")


def test_instruction_sets_of_arm_are_read_from_its_features(tmp_path: Path) -> None:
    text = "processor : 0\nFeatures\t: fp asimd aes asimddp i8mm bf16\nCPU part : 0xd40\n"
    assert cpu.instruction_sets(machine(tmp_path, cpuinfo=text)) == ("asimd", "asimddp", "bf16", "i8mm")


def test_this_machine_can_be_described() -> None:
    found = cpu.capabilities()
    assert 0 < found.available_memory <= found.total_memory
    assert found.num_cores >= 1
    assert found.ops_reason
