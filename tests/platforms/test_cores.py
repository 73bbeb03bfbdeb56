"""How many threads compute: physical cores, within the affinity and the quota of the control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.platforms import cores


def write(root: Path, **files: str) -> Path:
    """Files of a machine: `a__b` is a/b."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def topology(root: Path, *cores_of: str) -> Path:
    """Of logical CPU i, the list of those on the same core."""
    for cpu, siblings in enumerate(cores_of):
        write(root, **{f"sys__devices__system__cpu__cpu{cpu}__topology__thread_siblings_list": f"{siblings}\n"})
    return root


@pytest.mark.usefixtures("eight_cpus")
def test_hyper_threads_of_a_core_count_once(tmp_path: Path) -> None:
    assert cores.usable_cores(topology(tmp_path, *["0-1"] * 2, *["2-3"] * 2, *["4,6", "5,7"] * 2)) == 4


@pytest.mark.usefixtures("eight_cpus")
def test_cores_without_hyper_threads_count_beside_those_that_have_them(tmp_path: Path) -> None:
    assert cores.usable_cores(topology(tmp_path, "0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7")) == 6


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 3})
    assert cores.usable_cores(topology(tmp_path, "0-1", "0-1", "2-3", "2-3")) == 2


def test_without_any_file_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert cores.usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_a_system_without_affinity_offers_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores(tmp_path) == os.cpu_count()


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 8),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("350000 100000", 3),
        ("900000 100000", 8),
        ("", 8),
        ("nonsense", 8),
        ("100000 0", 8),
    ],
)
def test_a_quota_caps_the_cores(tmp_path: Path, quota: str, expected: int) -> None:
    assert cores.usable_cores(write(tmp_path, **{"sys__fs__cgroup__cpu.max": quota})) == expected


@pytest.mark.usefixtures("eight_cpus")
def test_the_smallest_quota_of_all_groups_around_the_process_holds(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__user.slice"
    files = {"proc__self__cgroup": "0::/user.slice/job.service\n", f"{group}__cpu.max": "200000 100000\n"}
    root = write(tmp_path, **files, **{f"{group}__job.service__cpu.max": "max 100000\n"})
    assert cores.usable_cores(root) == 2


@pytest.mark.usefixtures("eight_cpus")
def test_quotas_of_version_1_hold(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__cpu,cpuacct__box"
    files = {f"{group}__cpu.cfs_quota_us": "300000\n", f"{group}__cpu.cfs_period_us": "100000\n"}
    root = write(tmp_path, proc__self__cgroup="4:memory:/box\n3:cpu,cpuacct:/box\n", **files)
    assert cores.usable_cores(root) == 3
    write(tmp_path, **{f"{group}__cpu.cfs_quota_us": "-1\n"})
    assert cores.usable_cores(root) == 8


def nodes_of(root: Path, *cpus: str, allowed: str | None = None) -> Path:
    """Nodes that have these CPUs each, and the memory that the control groups leave to the process."""
    for node, own in enumerate(cpus):
        write(root, **{f"sys__devices__system__node__node{node}__cpulist": f"{own}\n"})
    if allowed is not None:
        write(root, proc__self__status=f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    return root


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("cpus", "allowed", "expected"),
    [
        (["0-7"], "0", (0,)),
        (["0-3", "4-7"], "0-1", (0, 1)),
        (["0,2,4,6", "1,3,5,7"], None, (0, 1)),
        (["0-3", "4-7"], "1", (1,)),
        (["0-3", "8-11", "4-7"], "0-2", (0, 2)),
        (["0-7", ""], "0-1", (0,)),
        ([], "0", ()),
    ],
)
def test_nodes_count_that_have_cores_and_memory_of_this_process(
    tmp_path: Path, cpus: list[str], allowed: str | None, expected: tuple[int, ...]
) -> None:
    assert cores.memory_nodes(nodes_of(tmp_path, *cpus, allowed=allowed)) == expected


def test_affinity_to_one_node_leaves_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5})
    assert cores.memory_nodes(nodes_of(tmp_path, "0-3", "4-7", allowed="0-1")) == (1,)
