"""CPU cores and memory available to this process, from its container's cgroups, and its limit of open files.

Every cgroup from the process's own up to the root of the mount may set a limit, in version 2 (one tree with `cpu.max`
and `memory.max`) or version 1 (a tree per controller, with `cpu.cfs_quota_us` and `memory.limit_in_bytes`). The
tightest limit applies.
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
    """Return the number of whole cores, at least 1: the process's affinity, capped by CPU quotas.

    A quota of 1.5 counts as one core: two threads that spin while they wait for each other would use it up, and the
    kernel would stop both until the next period. `root`: directory that contains /proc and /sys."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that can be allocated without swapping, on the machine or in the container, whichever is less.

    Page cache counts as available in both."""
    return max(0, min([int(psutil.virtual_memory().available), *_rooms(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Yield the whole cores that each cgroup with a quota allows."""
    for folder in _cgroups(root, "cpu"):
        quota, period = _numbers(folder / "cpu.max", folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota // period


def _rooms(root: Path) -> Iterator[int]:
    """Yield the bytes that each cgroup with a memory limit has left."""
    for folder in _cgroups(root, "memory"):
        (limit,) = _numbers(folder / "memory.max", folder / "memory.limit_in_bytes")
        (usage,) = _numbers(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            yield limit - usage + _file_pages(folder)


def _numbers(unified: Path, *split: Path) -> list[int | None]:
    """Read the numbers of version 2's file, or else of version 1's files; None for a missing or other value."""
    text = _text(unified)
    words = text.split() if text else [_text(path).strip() for path in split]
    found = [int(word) if word.removeprefix("-").isdecimal() else None for word in words]
    return (found + [None] * len(split))[: len(split)]


def _file_pages(folder: Path) -> int:
    """Return the page cache, in bytes, of this cgroup and its children, which the kernel reclaims when needed."""
    words = (line.split() for line in _text(folder / "memory.stat").splitlines())
    rows = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
    names = ("inactive_file", "active_file")
    return sum(rows.get(f"total_{name}", rows.get(name, 0)) for name in names)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, in the tree of the controller.

    A container whose /proc shows the host's paths finds its own cgroup at the root of the mount."""
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


def allow_descriptors() -> int:
    """Raise the soft limit of open files to the hard limit, and return the resulting limit.

    A link connection takes nine descriptors; the usual soft limit of 1,024 exists for programs that call select."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
