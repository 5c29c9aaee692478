"""CPU and memory limits of this process, from its container's cgroups.

Every cgroup from the process's own up to the root of what is mounted may set a limit, in version 2 (one tree with
`cpu.max` and `memory.max`) or 1 (a tree per controller, with `cpu.cfs_quota_us` and `memory.limit_in_bytes`). The
tightest counts.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")
_MOUNT = "sys/fs/cgroup"


def available_cores(root: Path = _ROOT) -> int:
    """Whole cores, at least 1: those of the process's affinity, or fewer where a quota says so.

    A quota of one and a half is one core: two threads that wait awake for each other would use it up, and both be
    stopped until the next period. `root`: where /proc and /sys are found."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that could still be taken without swapping: of the machine, or of the container where that leaves less.

    Pages that only cache files count as available, as they do for a machine."""
    return max(0, min([int(psutil.virtual_memory().available), *_rooms(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Whole cores that each cgroup with a quota allows."""
    for folder in _cgroups(root, "cpu"):
        quota, period = _numbers(folder / "cpu.max", folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota // period


def _rooms(root: Path) -> Iterator[int]:
    """Bytes that each cgroup with a limit has left."""
    for folder in _cgroups(root, "memory"):
        (limit,) = _numbers(folder / "memory.max", folder / "memory.limit_in_bytes")
        (usage,) = _numbers(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            yield limit - usage + _file_pages(folder)


def _numbers(unified: Path, *split: Path) -> list[int | None]:
    """The numbers in version 2's file, or else those in version 1's files; None for what is not there or no number."""
    text = _text(unified)
    words = text.split() if text else [_text(path).strip() for path in split]
    found = [int(word) if word.removeprefix("-").isdecimal() else None for word in words]
    return (found + [None] * len(split))[: len(split)]


def _file_pages(folder: Path) -> int:
    """Bytes of files that this cgroup and those below it keep in memory, and that the kernel takes back when needed."""
    words = (line.split() for line in _text(folder / "memory.stat").splitlines())
    rows = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
    names = ("inactive_file", "active_file")
    return sum(rows.get(f"total_{name}", rows.get(name, 0)) for name in names)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those above it, of the tree that has the controller.

    A container that sees its host's paths has its own cgroup at the root of the mount."""
    paths: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, place = line.partition(":")
        names, _, path = place.partition(":")
        paths |= dict.fromkeys(names.split(","), path)
    mount = root / _MOUNT
    unified = (mount / "cgroup.controllers").exists()
    top, path = (mount, paths.get("", "/")) if unified else (mount / controller, paths.get(controller, "/"))
    own = top / path.lstrip("/")
    while own != top and top in own.parents:
        if own.is_dir():
            yield own
        own = own.parent
    yield top


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def allow_descriptors() -> None:
    """Let this process open as many files as it may at all.

    A connection of the link takes nine, and the usual limit is 1,024, kept low for programs that call select."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
