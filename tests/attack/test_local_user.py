"""Attacker: another user of the machine, without rights.

At most it sees that the cluster runs, its command lines, and what its open status paths tell everybody."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.attack.attacked import MARKER, TENANTS, Attacked
from tests.attack.stranger import NOBODY, tried
from tests.local_cluster import MODEL
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
ROOT = Path(__file__).parents[2]
PRIVATE = ("environ", "mem", "maps", "auxv", "stack", "syscall")


def processes(attacked: Attacked) -> list[psutil.Process]:
    parent = psutil.Process(attacked.cluster.process.pid)
    return [parent, *parent.children(recursive=True)]


@pytest.fixture(scope="module")
def kept(shared_attacked: Attacked) -> Attacked:
    """It holds what a thief might want: files, a batch, its results, a stored response, blocks on disk."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": MARKER}], "max_tokens": 4}
    row = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    form = {"files": {"file": ("in.jsonl", row)}, "data": {"purpose": "batch"}}
    file = shared_attacked.ask("POST", "/v1/files", TENANTS[0], **form).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = shared_attacked.ask("POST", "/v1/batches", TENANTS[0], json=body).json()["id"]
    for number in range(5):
        shared_attacked.says(f"{number} {MARKER * 20}", TENANTS[0], 2)

    def done() -> bool:
        return bool(shared_attacked.ask("GET", f"/v1/batches/{batch}", TENANTS[0]).json()["output_file_id"])

    wait_for(done, 60)
    return shared_attacked


@pytest.fixture
def used(kept: Attacked, attacked: Attacked) -> Attacked:
    return attacked


@as_root
def test_a_local_user_reads_no_file_and_enters_no_folder(used: Attacked) -> None:
    """At most: the names of what the operator put into a folder of everybody's."""
    (socket,) = [used.cluster.redis_url.removeprefix("unix://")]
    assert stat.S_IMODE(Path(socket).parent.stat().st_mode) == 0o700
    got = tried({"folders": [str(used.home), str(Path(socket).parent)], "sockets": [socket]})
    assert got["uid"] == NOBODY
    assert got["read"] == [str(used.home / "keys.toml")], "all but the test's own file is private"
    assert not got["written"]
    assert not got["dialled"]
    made = [path for folder in ("data", "tier") for path in (used.home / folder).rglob("*")]
    assert any(path.suffix == ".data" for path in made)
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in made if path.exists())


@as_root
def test_a_local_user_learns_nothing_from_processes(used: Attacked) -> None:
    """At most: command lines, which hold no secret."""
    found = processes(used)
    assert len(found) >= 5
    for process in found:
        line = " ".join(process.cmdline())
        assert line
        assert not [secret for secret in used.secrets if secret in line]
        assert not [tenant for tenant in TENANTS if tenant in line]
    tries = [f"/proc/{process.pid}/{name}" for process in found for name in PRIVATE]
    links = [f"/proc/{process.pid}/{name}" for process in found for name in ("fd", "fdinfo", "map_files")]
    got = tried({"files": tries, "lists": links})
    assert not got["read"]
    assert not got["listed"]


@as_root
def test_a_local_user_reaches_no_memory_and_no_pipe(used: Attacked) -> None:
    """At most: the list of what is in /dev/shm, and the code, wherever it is installed."""
    own = {process.pid for process in processes(used)}
    shared = [path for path in Path("/dev/shm").iterdir() if path.is_file()]
    assert not [path for path in shared if path.stat().st_mode & 0o077 and _maps(own, str(path))]
    data = [path for path in _paths(own) if path.startswith(("/dev/shm", "/tmp", "/run"))]
    got = tried({"files": [path for path in data if not path.startswith((sys.prefix, str(ROOT)))]})
    assert not got["read"]
    named, abstract = _sockets(own)
    assert not abstract, "everybody reaches a socket without a path"
    assert named, "Valkey listens on one"
    assert not tried({"sockets": named})["dialled"]


def test_ports_on_loopback_tell_a_local_user_nothing(used: Attacked) -> None:
    """At most: versions, loads and counts, from workers and from the router."""
    open_paths = ("/health", "/ready", "/metrics", "/version")
    leases = used.cluster.leases()
    assert len(leases) == 2
    for url in [*(lease.http_url for lease in leases), used.cluster.url]:
        for path in open_paths:
            answer = httpx.get(url + path, timeout=10)
            secret = [*used.secrets, *TENANTS, MARKER.split()[2], str(used.home)]
            assert not [each for each in secret if each in answer.text], (url, path)


def test_the_log_holds_neither_secrets_nor_texts(used: Attacked) -> None:
    """At most: nodes, ids and counts."""
    log = "\n".join(used.cluster.log)
    assert "ready" in log
    assert not [secret for secret in (*used.secrets, MARKER[:20], "pineapples") if secret in log]


def _maps(pids: set[int], path: str) -> bool:
    return any(path in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def _paths(pids: set[int]) -> list[str]:
    """Of the files that the processes hold open or map."""
    found = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.add(os.readlink(fd))
            except OSError:
                continue
        found |= {
            line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line
        }
    return [path for path in found if path.startswith("/")]


def _sockets(pids: set[int]) -> tuple[list[str], list[str]]:
    """Unix sockets that the processes listen on, with a path and without one."""
    held = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                name = os.readlink(fd)
            except OSError:
                continue
            held |= {name[8:-1]} if name.startswith("socket:[") else set()
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    bound = [row[7] for row in rows if len(row) > 7 and row[6] in held and int(row[3], 16) & 0x10000]
    return [name for name in bound if not name.startswith("@")], [name for name in bound if name.startswith("@")]
