"""Surroundings in which processes are started: small disks, little memory, few descriptors, other networks and names.

Each is a command that changes what is around it and becomes the one that follows. Root may make them; `missing` says
why not where it may not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_CGROUPS = Path("/sys/fs/cgroup")


def missing(*flags: str) -> str:
    """Why processes cannot get namespaces of their own here; empty if they can. flags: as of unshare(1)."""
    if shutil.which("unshare") is None:
        return "unshare(1) is not installed"
    tried = subprocess.run(
        ["unshare", *flags, "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True, text=True, timeout=20
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def inside(steps: Sequence[str], *flags: str) -> list[str]:
    """The command that takes these steps of a shell, in namespaces of its own, and becomes what follows."""
    unshared = ["unshare", *flags] if flags else []
    return [*unshared, "sh", "-c", "\n".join(("set -e", *steps, 'exec "$@"')), "sh"]


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """This thread, and those that it starts, are in the network of the process meanwhile."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _enter(other)
        yield
    finally:
        _enter(own)
        os.close(own)
        os.close(other)


def _enter(descriptor: int) -> None:
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def memory_of(pid: int, limit: int) -> Iterator[str]:
    """The process may take so many bytes more, be it by a cgroup or by a limit of its address space: which it is."""
    cgroup = _cgroup(limit)
    if cgroup is None:
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        subprocess.run(["prlimit", f"--pid={pid}", f"--as={size + limit}"], check=True)
        yield "address space"
        return
    try:
        (cgroup / "cgroup.procs").write_text(str(pid))
        yield "cgroup"
    finally:
        with contextlib.suppress(OSError):
            (cgroup.parent / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            cgroup.rmdir()


def _cgroup(limit: int) -> Path | None:
    """A new cgroup with this limit; None where none can be made."""
    for top, name in (_CGROUPS / "memory", "memory.limit_in_bytes"), (_CGROUPS, "memory.max"):
        with contextlib.suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix="kvferry-attack-", dir=top))
            try:
                if not (made / name).exists():
                    raise FileNotFoundError(name)
                (made / name).write_text(str(limit))
            except OSError:
                made.rmdir()
                continue
            return made
    return None
