"""Cores and memory under made-up cgroup trees of both versions."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.runtime.limits import allow_descriptors, available_cores, available_memory

MIB = 1024**2


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores, 1000 MiB available."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000 * MIB))


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A file system with /proc/self/cgroup and, below /sys/fs/cgroup, these files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def unified(root: Path, files: dict[str, str], cgroup: str = "0::/\n") -> Path:
    return tree(root, cgroup, {"cgroup.controllers": "cpu memory\n"} | files)


SPLIT = "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("200000 100000", 2),
        ("390000 100000", 3),
        ("6400000 100000", 16),
        ("max 100000", 16),
        ("garbage", 16),
        ("", 16),
        ("100000 0", 16),
    ],
)
def test_quotas_of_version_2_are_rounded_down(tmp_path: Path, quota: str, expected: int) -> None:
    assert available_cores(unified(tmp_path, {"cpu.max": quota})) == expected


@pytest.mark.parametrize(("quota", "expected"), [("150000", 1), ("350000", 3), ("-1", 16), ("", 16)])
def test_quotas_of_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert available_cores(tree(tmp_path, SPLIT, files)) == expected


def test_the_tightest_cgroup_above_counts(tmp_path: Path) -> None:
    root = unified(
        tmp_path,
        {
            "pod/container/cpu.max": "800000 100000",
            "pod/cpu.max": "450000 100000",
            "pod/container/memory.max": str(700 * MIB),
            "pod/container/memory.current": str(100 * MIB),
            "pod/memory.max": str(800 * MIB),
            "pod/memory.current": str(650 * MIB),
        },
        "0::/pod/container\n",
    )
    assert available_cores(root) == 4
    assert available_memory(root) == 150 * MIB


@pytest.mark.parametrize(
    ("limit", "usage", "expected"),
    [(600, 100, 500 + 30), (2000, 100, 1000), (600, 630, 0), (600, 700, 0), ("max", 100, 1000)],
)
def test_memory_of_version_2_is_what_the_limit_leaves(tmp_path: Path, limit: object, usage: int, expected: int) -> None:
    """Cached files are given back when memory is asked for; anonymous pages and tmpfs are not."""
    stat = f"anon 5\nfile {60 * MIB}\nshmem {30 * MIB}\ninactive_file {20 * MIB}\nactive_file {10 * MIB}\n"
    files = {
        "memory.max": str(limit * MIB) if isinstance(limit, int) else f"{limit}\n",
        "memory.current": f"{usage * MIB}\n",
        "memory.stat": stat,
    }
    assert available_memory(unified(tmp_path, files)) == expected * MIB


def test_memory_of_version_1(tmp_path: Path) -> None:
    stat = f"cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file {8 * MIB}\ntotal_active_file {2 * MIB}\n"
    files = {
        "memory/memory.limit_in_bytes": f"{512 * MIB}\n",
        "memory/memory.usage_in_bytes": f"{312 * MIB}\n",
        "memory/memory.stat": stat,
        "memory/docker/abc/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/docker/abc/memory.usage_in_bytes": "1\n",
    }
    assert available_memory(tree(tmp_path, SPLIT, files)) == 210 * MIB


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 16
    assert available_memory(tmp_path) == 1000 * MIB


@pytest.mark.parametrize(
    "line", [b"no cgroup at all\n", b"5:memory\n", b"0::/\xff\xfe\n", b"\n", b"0::/../../elsewhere\n"]
)
def test_a_tree_that_cannot_be_read_sets_no_limit_and_ends_nothing(tmp_path: Path, line: bytes) -> None:
    root = unified(tmp_path, {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.stat": "file \nfile x\n\n"})
    (root / "proc/self/cgroup").write_bytes(line)
    assert available_cores(root) == 16
    assert available_memory(root) == 1000 * MIB


def test_statistics_that_are_no_numbers_count_as_nothing(tmp_path: Path) -> None:
    stat = "inactive_file many\nactive_file \nactive_file 1048576\n"
    files = {"memory.max": f"{100 * MIB}\n", "memory.current": f"{40 * MIB}\n", "memory.stat": stat}
    assert available_memory(unified(tmp_path, files)) == 61 * MIB


def test_a_process_may_open_as_many_files_as_it_may_at_all(monkeypatch):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 65536))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: given.append(pair))
    assert allow_descriptors() == 1024, "as the system says"
    assert given == [(65536, 65536)]
